"""``fairseq-deep export --format torch``: a stranger's beam search around the two programs translates as the model."""

import io
import re
import runpy
import sys

import pytest
import torch

from fairseq_deep.runtime import Translator
from fairseq_deep.tools import torch_format
from tests.helpers.commands import WITHOUT_PLUGIN, run
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples/translate_pt2.py"


@pytest.fixture(scope="module")
def example():
    """The names of the example, which no module of this package is in."""
    names = runpy.run_path(str(EXAMPLE))
    assert not any(str(getattr(each, "__module__", "")).startswith("fairseq_deep") for each in names.values())
    return names


@pytest.fixture(scope="module")
def recipe(trained, tmp_path_factory):
    """The export of a recipe's DLCL, and what the command printed."""
    file = tmp_path_factory.mktemp("export") / "model.pt2"
    words = ["--output", file, "--licence", "MIT", "--verify-sentences", "8", "--capacity", "64"]
    return file, run("fairseq-deep", "export", trained, "--format", "torch", *words)


def test_the_example_translates_raw_text_as_translate_does(recipe, trained):
    file, done = recipe
    found = r"log-probabilities of 8 sentences within \d\.\de-0[67], 8 of 8 translations equal "
    found += r"\(test.en, beam 3, lenpen 0.8\)\n"
    assert re.search(f" -> {file}: beam 3, 64 positions; {found}", done.stdout) and done.stderr == ""
    lines = [*(trained / "text/raw/test.en").read_text().splitlines(), "", "Unknown Words?"]
    shown = run("python3", EXAMPLE, file, stdin="\n".join(lines) + "\n", prepare=WITHOUT_PLUGIN)
    assert shown.stdout.split("\n")[:-1] == Translator(str(trained), cpu=True).translate(lines)
    assert shown.stderr == "" and len({*shown.stdout.split("\n")}) > 5


def test_the_description_is_that_of_the_programs(recipe, example):
    model = example["Model"](str(recipe[0]))
    settings, (encoder, step) = model.settings, (model.settings["programs"][name] for name in ("encoder", "step"))
    assert settings["search"] == {"beam": 3, "lenpen": 0.8, "max_len_a": 1.0, "max_len_b": 50, "gnmt_lenpen": False}
    assert (settings["format"], settings["capacity"], settings["max_source"]) == (torch_format.FORMAT, 64, 24)
    assert settings["text"] == {"tokenizer": "moses", "lowercase": False, "sub_words": "subword-nmt", "tags": []}
    card = model.files["README.md"]
    assert "| licence | MIT |" in card and "load only files that you trust" in card
    sizes = {"sentences": 2, "words": 5}

    def check(tensors, entries):
        described = [[sizes.get(size, size) for size in entry["shape"]] for entry in entries]
        assert [list(tensor.shape) for tensor in tensors] == described
        assert [str(tensor.dtype) for tensor in tensors] == [f"torch.{entry['dtype']}" for entry in entries]

    with torch.no_grad():
        source, caches = model.encoder(torch.full((2, 5), 6))
        words = torch.full((2, 3), 2)
        inputs = [words, torch.zeros_like(words), torch.tensor([0]), source, caches]
        scores, updated = model.step(*inputs)
    check([torch.full((2, 5), 6)], encoder["inputs"])
    check([*source.values(), *caches.values()], encoder["outputs"])
    check([*inputs[:3], *source.values(), *caches.values()], step["inputs"])
    check([scores, *updated.values()], step["outputs"])
    names = [f"{group}.{name}" for group, each in (("source", source), ("caches", caches)) for name in each]
    assert [entry["name"] for entry in step["inputs"]] == ["words", "order", "position", *names]


def test_half_precision(make, tmp_path, command, example):
    """The command compares the log-probabilities."""
    make("postnorm_6l", encoder_layers=1, decoder_layers=1, share_all_embeddings=True)
    words = ["--format", "torch", "--tokenizer", "none", "--dtype", "bfloat16", "--output", tmp_path / "model.pt2"]
    assert command("export", tmp_path / "model.pt", *words)[0] == 0
    programs = example["Model"](str(tmp_path / "model.pt2")).settings["programs"]
    types = {entry["name"]: entry["dtype"] for entry in programs["step"]["inputs"]}
    assert {*types.values()} == {"int64", "bfloat16"} and types["words"] == "int64"


def test_bad_files_are_one_line(recipe, tmp_path, example, monkeypatch):
    def ends(file, text=""):
        monkeypatch.setattr(sys, "argv", ["translate_pt2.py", str(file)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(SystemExit) as end:
            example["main"]()
        assert "\n" not in end.value.code
        return end.value.code

    file = recipe[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # a weight
    for end, problem in ((None, "is damaged"), (len(content) // 2, "BadZip")):
        (tmp_path / "bad.pt2").write_bytes(content[:end])
        told = ends(tmp_path / "bad.pt2")
        assert told.startswith(f"cannot load {tmp_path}/bad.pt2: ") and problem in told
    assert ends(file, "a " * 30) == "a line has 30 tokens, and the model has 24 positions: split it"
