"""Every refusal of ``fairseq-deep COMMAND``: status 2, one line that begins with the command, and nothing written.

The commands are in commands.txt; all names are relative to a copy of the prepared files.
"""

import argparse
import gzip
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_deep import cli
from tests.errors import assert_says, rows
from tests.helpers.exports import checkpoint, learn_pieces, write_model
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import make_dictionary, make_tagged_dictionary
from tests.helpers.paths import STOCK

GROWS = "encoder.layers.3.residual.scale"
SHARED, PAIR = torch.zeros(2), {"a": torch.zeros(2), "b": torch.zeros(2, 3)}
CHECKPOINTS = {
    "one.pt": {"w": torch.ones(2)}, "nan.pt": {"w": torch.tensor([1, math.nan])},
    "inf.pt": {"w": torch.tensor([-math.inf, 1])}, "ab.pt": PAIR, "a.pt": {"a": torch.zeros(2)},
    "abc.pt": {**PAIR, "c": torch.zeros(1)}, "turned.pt": {**PAIR, "b": torch.zeros(3, 2)},
    "whole.pt": {**PAIR, "b": torch.zeros(2, 3, dtype=torch.int64)}, "tied.pt": {"a": SHARED, "b": SHARED},
    "untied.pt": {"a": SHARED, "b": SHARED.clone()}, "grows.pt": {GROWS: torch.tensor(0.5)},
    "grown.pt": {GROWS: torch.tensor(0.75)}, "empty.pt": {}, "sparse.pt": {"w": torch.eye(2).to_sparse()},
    "meta.pt": {"w": torch.ones(2, device="meta")}, "number.pt": {3: torch.ones(1)},
    "dlcl.pt": {"encoder.history.weight": torch.eye(3)}, "bad.pt": {"encoder.history.weight": torch.eye(3) * math.nan},
    "dir/checkpoint1.pt": {"w": torch.ones(2)}, "dir/checkpoint2.pt": {"w": torch.ones(2)},
    "dir/run/checkpoints/checkpoint_1_500.pt": {"w": torch.ones(2)},
    "best/checkpoint.best_mystery_1.0.pt": {"w": torch.ones(2)},
    "mixed/checkpoint.best_mystery_1.0.pt": {"w": torch.ones(2)},
    "mixed/checkpoint.best_loss_1.0.pt": {"w": torch.ones(2)},
}  # fmt: skip
ARCH = {"arch": "transformer_prenorm_6l", "_name": "transformer_prenorm_6l"}
ODD = {
    "cfg.pt": {"cfg": ["model"]}, "model.pt": {"cfg": {"model": "transformer"}},
    "args.pt": {"args": {"arch": "x"}}, "de-en.pt": {"task_state": {"languages": ["de", "en"]}},
    "heads8.pt": {"cfg": {"model": argparse.Namespace(**ARCH)}, "task_state": {"languages": ["en", "de"]}},
    "heads4.pt": {"cfg": {"model": argparse.Namespace(**ARCH, encoder_attention_heads=4)}},
}  # fmt: skip
LINE = "The old man did not see the red-haired girl yesterday."
WORDS = [f"{LINE} {number}" for number in range(60)]
TEXTS = {
    "sys": [LINE] * 4, "ref": [LINE] * 4, "three": [LINE] * 3, "void": [], "text.pt": ["no checkpoint"],
    "ours": WORDS, "truth": WORDS, "cmp/test.hyp.de": WORDS, "cmp/test.ref.de": WORDS, "bare/test.hyp.de": WORDS,
    "many/test.hyp.de": WORDS, "many/test.hyp.en": WORDS, "many/test.ref.de": WORDS, "short/test.hyp.de": WORDS[:59],
    "short/test.ref.de": WORDS, "fewer/test.hyp.de": WORDS[:59], "fewer/test.ref.de": WORDS[:59],
    "cropped/test.hyp.de": WORDS, "cropped/test.ref.de": WORDS[:59],
    "other/test.hyp.de": WORDS, "other/test.ref.de": [*WORDS[:41], "another", *WORDS[42:]],
    "pairs/test.en-de.hyp": WORDS, "pairs/test.en-de.ref": WORDS, "pairs/test.en-fr.hyp": WORDS,
    "pairs/test.en-fr.ref": WORDS, "pair/test.en-de.hyp": WORDS, "pair/test.en-de.ref": WORDS[::-1],
    "uneven/test.en-de.hyp": WORDS, "uneven/test.en-de.ref": WORDS[:9],
    "gen": ["T-0\ta house is here", "H-0\t-1\ta house was here"], "full/x": ["x"], "in.txt": ["We see “it”…"],
    "ct2/config.json": ["{}"], "ct2/model.bin": ["{}"], "hf/config.json": ["{}"], "hf/model.safetensors": ["{}"],
    "hf/tokenizer_config.json": ["{}"],
}  # fmt: skip
EXPORTS = {"plain.package": "package", "plain.ctranslate2": "export --format ctranslate2",
           "plain.huggingface": "export --format huggingface"}  # fmt: skip
PARTS = ("averaged.pt", "data-bin/dict.en.txt", "data-bin/dict.de.txt", "text/bpe/code", "text/bpe/steps.json")


def fill(row, value):
    return lambda state: state["model"]["encoder.embed_tokens.weight"][row].fill_(value)


def diverge(state):
    state["model"] = {name: value * math.nan for name, value in state["model"].items()}


def rename(state):
    state["cfg"]["model"]._name = state["cfg"]["model"].arch = "transformer_align"


VARIANTS = {  # of the checkpoint in ``parts``
    "inf": fill(0, math.inf), "large": fill(5, 1e30), "diverged": diverge, "renamed": rename,
    "pruned": lambda state: vars(state["cfg"]["model"]).update(encoder_layers_to_keep="0,1"),
    "french": lambda state: state["cfg"]["task"].update(target_lang="fr"),
    "nameless": lambda state: state["cfg"]["task"].update(source_lang=None, target_lang=None),
    "stateless": lambda state: state.pop("task_state"),  # which has the dictionaries
}  # fmt: skip


@pytest.fixture(scope="session")
def prepared(trained, tmp_path_factory):
    """All files of the rows; ``run`` is a recipe's directory, and ``parts`` its checkpoint with what it needs."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in [*TEXTS, *CHECKPOINTS, "parts/x", "void-folder/x", "seeds/seed2/x"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, lines in TEXTS.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "latin1").write_bytes("gut\nsch\u00f6n\n".encode("latin-1"))
    for name in ("in.txt.gz", "in.txt.tgz"):
        (folder / name).write_bytes(gzip.compress(b"We see.\n"))
    for name, model in CHECKPOINTS.items():
        checkpoint(folder / name, model)
    for name, others in ODD.items():
        checkpoint(folder / name, {"w": torch.ones(2)}, **others)
    torch.save({"weights": 1}, folder / "other.pt")
    os.symlink("one.pt", folder / "link.pt")
    shutil.copytree(trained, folder / "run", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(trained / "data-bin", folder / "swapped")
    shutil.copytree(trained / "text/raw", folder / "text")
    for name in PARTS:
        shutil.copy(trained / name, folder / "parts")
    for name, change in VARIANTS.items():
        state = torch.load(folder / "parts/averaged.pt", weights_only=False)
        change(state)
        torch.save(state, folder / f"parts/{name}.pt")
    (folder / "cut.pt").write_bytes(STOCK.read_bytes()[:40000])
    os.symlink(STOCK, folder / "stock.pt")
    (folder / "plain").mkdir()
    write_model(folder / "plain", "prenorm_6l", (make_dictionary(38), make_dictionary(30)))
    for name, words in EXPORTS.items():
        cli.main(f"{words} {folder}/plain/model.pt --tokenizer none --output {folder}/{name}".split())
    for name in ("norm", "transform"):
        (folder / name).mkdir()
        write_model(folder / name, "postnorm_6l", (make_tagged_dictionary(38, 6), make_dictionary(30)),
                    language_norm=True, language_transform=name == "transform", decoder_layers=2)  # fmt: skip
    for lang in ("en", "de"):
        words = (folder / f"swapped/dict.{lang}.txt").read_text().splitlines(keepends=True)
        (folder / f"swapped/dict.{lang}.txt").write_text("".join([words[1], words[0], *words[2:]]))
    learn_pieces(folder / "spm.model", ["we see the house", "the house is old"], vocab_size=20)
    return folder


@pytest.fixture
def before():
    """Nothing is changed before the command; rows of a table have their own lines."""
    return ""


@pytest.fixture
def place(before, prepared, tmp_path, monkeypatch):
    """A copy of all files as the current directory, changed by the lines of bash *before* the command."""
    copy = shutil.copy2 if before else os.link
    folder = shutil.copytree(prepared, tmp_path / "place", symlinks=True, copy_function=copy)
    if before:
        subprocess.run(["bash", "-ec", before], cwd=folder, check=True)
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    """Every path in *folder* with its state, which a write would change."""
    states = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (state.st_size, state.st_mtime_ns, state.st_ino) for path, state in states}


def refuse(words, said, folder, capsys):
    """Run the command, which is to be refused as the module's docstring says."""
    before = contents(folder)
    capsys.readouterr()
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    out, line = capsys.readouterr()
    assert (status, out) == (2, ""), line
    assert line.startswith(f"fairseq-deep {words[0]}: "), line
    assert_says(line.removeprefix(f"fairseq-deep {words[0]}: "), said)
    assert contents(folder) == before


@pytest.mark.parametrize("before, command, said", [
    *rows("commands"),
    pytest.param("", "package run --name 'a\nb' --output out", "run/averaged.pt cannot be packaged: name is ...",
                 id="package run --name with a line break"),
])  # fmt: skip
def test_a_command_is_refused_in_one_line(before, command, said, place, capsys):
    if any(name in command and not (place / name).exists() for name in EXPORTS):
        pytest.skip("needs the format's package")
    refuse(shlex.split(command), said, place, capsys)


def test_a_missing_package_is_named(place, capsys, monkeypatch):
    monkeypatch.setattr("fairseq_deep.tools.measuring._batch", lambda *_: pytest.fail("measured before"))
    for name in ["matplotlib.figure", *(name for name in sys.modules if name.startswith("matplotlib.figure."))]:
        monkeypatch.setitem(sys.modules, name, None)
    words = ["diagnose", "run/data-bin", "--arch", POST, "--plot", "a.png"]
    refuse(words, "...pip install matplotlib...", place, capsys)


RUN = ["run/averaged.pt", "run/data-bin/dict.en.txt", "run/text/bpe/code", "run/train.jsonl"]
OUTPUTS = {  # commands with OUT for the output, and inputs that OUT must not be
    "translate run --input in.txt --output OUT": [*RUN, "in.txt"],
    "translate lone.pt --input in.txt --output OUT": ["lone.pt", "code", "dict.en.txt", "steps.json", "in.txt"],
    "translate lone.pt --bpe-codes hyp.txt --data run/data-bin --output OUT": ["hyp.txt", "run/data-bin/dict.de.txt"],
    "plot weights lone.pt --csv OUT": ["lone.pt"],
    "plot weights lone.pt --json OUT": ["lone.pt"],
    "plot run run log.jsonl --csv OUT": ["run/train.jsonl", "run/averaged.pt", "log.jsonl"],
    "diagnose run/data-bin --path lone.pt --json OUT": ["lone.pt", "run/data-bin/dict.en.txt"],
    "diagnose run/data-bin --arch 'dlcl --init-from=lone.pt' --encoder-embed-path in.txt --json OUT":
        ["lone.pt", "in.txt"],
    "report run --generate-output gen.txt --output OUT": [*RUN, "run/test.hyp.de", "run/RESULT.json", "gen.txt"],
    "score --sys hyp.txt --ref ref.txt --against run --json OUT": ["hyp.txt", "ref.txt", "run/test.hyp.de"],
    "score --generate-output gen.txt --hypotheses OUT": ["gen.txt"],
    "score --generate-output gen.txt --references OUT": ["gen.txt"],
    "score --multilingual pairs --json OUT": ["pairs/test.en-de.ref"],
    "average --inputs lone.pt other.pt --output OUT": ["lone.pt", "other.pt"],
    "average --dir epochs --last 1 --output OUT": ["epochs/checkpoint1.pt", "epochs/checkpoint2.pt"],
    "average --inputs pkg/model.safetensors --output OUT": ["pkg/config.json"],
    "export lone.pt --output OUT": ["lone.pt"],
    "export run --output OUT": ["run/averaged.pt"],
}  # fmt: skip
NAMES = {*sum(OUTPUTS.values(), []), "run/train.sh", "run/test.ref.de", "run/data-bin/dict.de.txt", "dict.de.txt",
         "pairs/test.en-de.hyp", "pkg/model.safetensors"}  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_writes_over_its_input(command, tmp_path, monkeypatch, capsys):
    """By its own name, by its absolute name, by a symbolic link and by a hard link."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    for name in OUTPUTS[command]:
        Path("link").symlink_to(name)
        os.link(name, "hard")
        for output in (name, os.path.abspath(name), "link", "hard"):
            words = [output if word == "OUT" else word for word in shlex.split(command)]
            refuse(words, f"cannot write {output}: it is an input...", tmp_path, capsys)
        os.remove("link")
        os.remove("hard")
