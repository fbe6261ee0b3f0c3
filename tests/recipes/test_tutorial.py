"""examples/own_text/tutorial.md: every step after the installation, as the page has it, on tiny text and models."""

import json
import random
import re
import subprocess

import pytest

from fairseq_deep.cli import main as fairseq_deep_command
from fairseq_deep.tools.results import read
from tests.helpers.forkserver import stand_in
from tests.helpers.paths import ROOT
from tests.helpers.recipes import LANGS, WORDS, fork_drivers, lines, make_real, write_pairs, write_program

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
    """all.en and all.de, with pairs that occur twice and one without a source."""
    rng = random.Random(7)
    words = [rng.choices(list(WORDS.items()), k=rng.randint(4, 6)) for _ in range(300)]
    pairs = [[" ".join(side) + "." for side in zip(*pair)] for pair in words]
    write_pairs(folder, all=[("", "leer"), *pairs, *pairs[:50]])


@pytest.fixture
def work(tools, tmp_path):
    """A folder with blanks, as a clone has what the page takes from it."""
    make_real(tools, train=SMALL)
    fork_drivers(tools)
    write_program(tools / "forked-python", stand_in("python3"))
    write_program(tools / "shuf", "exec cat")  # the pair without a source, which sort puts first, is a test sentence
    folder = tmp_path / "my work"
    write_text(folder)
    for name in ("examples", "fairseq_deep"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(work, *command):
    """What the command, which succeeds, printed to its two streams."""
    how = {"cwd": work, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(list(map(str, command)), **how)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout, done.stderr


def translated(model, source, output, *words):
    """The lines of *source*, translated in this process."""
    files = ["--input", str(source), "--output", str(output)]
    assert fairseq_deep_command(["translate", str(model), "--cpu", *words, *files]) == 0
    return lines(output)


def sets_of(folder):
    return {
        name: list(zip(*(lines(folder / f"{name}.{lang}") for lang in LANGS))) for name in ("train", "valid", "test")
    }


def assert_text_is_split(work):
    sets = sets_of(work / "text")
    pairs = [pair for each in sets.values() for pair in each]
    assert set(pairs) == set(zip(*(lines(work / f"all.{lang}") for lang in LANGS)))
    assert len(pairs) == len(set(pairs)), "no test sentence is in the training text"
    assert len(sets["valid"]) == len(sets["test"]) == len(pairs) // 20


def assert_recipe_ran(work, said):
    exp = work / "exp/first"
    record = json.loads((exp / "RESULT.json").read_text())
    assert f"BLEU = {record['bleu']:.2f}\n" in said and "tok:13a" in record["signature"]
    assert record["pairs"] == {name: len(each) for name, each in sets_of(work / "text").items()}
    assert record["updates"] > 1 and record["parameters"] > 1000
    [found] = read(str(exp))
    assert found["system"] == "transformer_dlcl_12l" and found["folder"] == "." and found["bleu"] == record["bleu"]
    translations = lines(exp / "test.hyp.de")
    assert len(translations) == record["pairs"]["test"] and translations[0] == "" != translations[1]
    assert (exp / "env.txt").read_text().startswith("python ")
    assert "BLEU = " in run(work, exp / "resume.sh")[0]
    assert fairseq_deep_command(["report", str(exp)]) == 0
    page = (exp / "report.html").read_text()
    assert all(part in page for part in (record["signature"], translations[1], "<svg"))


def assert_stock_model_grew(work, said):
    copied = "encoder layers 1 1 2 2 3 3 4 4 5 5 6 6, decoder layers 1 2 3 4 5 6; "
    assert f"--init-from stock/checkpoint_best.pt (transformer): {copied}" in said
    for name in ("stock.de", "deeper.de"):
        assert len(lines(work / name)) == len(lines(work / "text/test.de"))


def assert_student_learns_from(teacher, work):
    """With --teacher, the training targets are translations; other sets and all sources are the original ones."""
    words = ["--data", "text", "--exp", "student", "--stop-stage", "1", "--teacher", teacher]
    run(work, "examples/own_text/run.sh", *words)
    ours, theirs = sets_of(work / "student/text/raw"), sets_of(teacher / "text/raw")
    # a source without a reference has a translation, too
    assert {source for source, _ in theirs["train"]} <= {source for source, _ in ours["train"]}
    assert ours["valid"] == theirs["valid"] and ours["train"] != theirs["train"]


def test_every_step_of_the_tutorial(work):
    printed, errors = run(work, "bash", "-euo", "pipefail", "-c", script())
    assert_text_is_split(work)
    assert_recipe_ran(work, printed)
    assert_stock_model_grew(work, printed + errors)
    (work / "house").write_text("The old house is beautiful.\n")
    [translation] = translated(work / "my_model", work / "house", work / "again")
    assert translation and printed.endswith(f"\n{translation}\n"), "the page's last program is in Python"
    assert_student_learns_from(work / "exp/first", work)
