"""examples/own_text/tutorial.md: every step after the installation, as the page has it, on tiny text and models."""

import json
import random
import re
import subprocess

import torch

from fairseq_deep.tools.main import main as fairseq_deep_command
from tests.helpers.forkserver import server
from tests.helpers.paths import ROOT
from tests.helpers.recipes import WORDS, environment, lines, make_real, write_program

PAGE = (ROOT / "examples/own_text/tutorial.md").read_text(encoding="utf-8")
SMALL = ("--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 "
         "--max-epoch 1")  # fmt: skip
RUN = {"bash": "{}", "python": "forked-python -c \"$(cat <<'END'\n{}END\n)\"\n"}


def script():
    """The code of the page as one program; its first block installs, which the tests of the package do."""
    (_, installs), *steps = re.findall(r"(?ms)^```(.*?)\n(.*?)^```$", PAGE)
    assert "pip install" in installs and PAGE.count("```") == 2 + 2 * len(steps)
    return "".join(RUN[kind].format(code) for kind, code in steps)


def write_text(folder):
    """all.en and all.de, with pairs that occur twice."""
    rng = random.Random(7)
    pairs = [[rng.choice(list(WORDS.items())) for _ in range(rng.randint(4, 6))] for _ in range(300)]
    for side, lang in enumerate(("en", "de")):
        text = "".join(" ".join(word[side] for word in pair) + ".\n" for pair in (*pairs, *pairs[:50]))
        (folder / f"all.{lang}").write_text(text, encoding="utf-8")


def encoder_of(folder):
    state = torch.load(folder / "checkpoint_best.pt", weights_only=False)["model"]
    return {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}


def test_every_step(tools, tmp_path):
    make_real(tools)
    write_program(tools / "fairseq-train", f'set -- "$@" {SMALL}\n{server().stand_in("fairseq-train")}')
    write_program(tools / "forked-python", server().stand_in("python3"))
    for name in ("examples", "fairseq_deep"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_text(tmp_path)
    command = ["bash", "-euo", "pipefail", "-c", script()]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tools), capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]

    sets = {name: list(zip(lines(tmp_path / f"text/{name}.en"), lines(tmp_path / f"text/{name}.de")))
            for name in ("train", "valid", "test")}  # fmt: skip
    pairs = [pair for each in sets.values() for pair in each]
    assert set(pairs) == set(zip(lines(tmp_path / "all.en"), lines(tmp_path / "all.de")))
    assert len(pairs) == len(set(pairs)), "no test sentence is in the training text"
    assert len(sets["valid"]) == len(sets["test"]) == len(pairs) // 20

    record = json.loads((tmp_path / "exp/first/RESULT.json").read_text())
    assert record["pairs"] == {name: len(each) for name, each in sets.items()}
    assert record["arch"] == "transformer_dlcl_12l" and f"BLEU = {record['bleu']:.2f}\n" in done.stdout

    copied = "encoder layers 1 1-2 2-3 3-4 4-5 5-6 6, decoder layers 1-6; "
    assert f"--init-from stock/checkpoint_best.pt (transformer): {copied}" in said
    stock, deeper = (encoder_of(tmp_path / name) for name in ("stock", "deeper"))
    assert [sum(name.endswith("fc1.weight") for name in each) for each in (stock, deeper)] == [6, 12]
    assert "history.weight" in deeper and "history.weight" not in stock
    assert [len(lines(tmp_path / f"{name}.de")) for name in ("stock", "deeper")] == 2 * [len(sets["test"])]

    (tmp_path / "green").write_text("The old house is green.\n")
    words = [str(tmp_path / name) for name in ("my_model", "green", "again")]
    assert fairseq_deep_command(["translate", words[0], "--input", words[1], "--output", words[2]]) == 0
    [translation] = lines(tmp_path / "again")
    assert translation and done.stdout.endswith(f"\n{translation}\n")  # the page's last program is in Python
