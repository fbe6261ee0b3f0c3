"""``fairseq-deep export --format torch``: a stranger's beam search around the two programs translates as the model."""

import io
import re
import runpy
import sys
import zipfile

import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.runtime import Translator, find_bundle, text
from fairseq_deep.tools import torch_format
from tests.helpers.commands import run
from tests.helpers.exports import dictionary_of, learn_pieces, tokenised_lines, write_model
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples/translate_pt2.py"
ONE = {"encoder_layers": 1, "decoder_layers": 1}
STRUCTURES = {
    "LSTM": ("lstm_6l", ONE, ["--capacity", "20"], "float32"),
    "merged attention": ("ds_matt_12l12l", ONE, ["--beam", "1"], "float32"),
    "post-norm": ("postnorm_6l", {**ONE, "share_all_embeddings": True}, ["--dtype", "bfloat16"], "bfloat16"),
}


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


ALONE = """import runpy, sys
sys.modules["fairseq_deep"] = sys.modules["fairseq"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""
"""A program that cannot import this package or fairseq, and runs another one."""


def test_the_example_translates_raw_text_as_translate_does(recipe, trained):
    file, done = recipe
    found = r"log-probabilities of 8 sentences within \d\.\de-0[67], 8 of 8 translations equal "
    found += r"\(test.en, beam 3, lenpen 0.8\)\n"
    assert re.search(f" -> {file}: beam 3, 64 positions; {found}", done.stdout) and done.stderr == ""
    lines = [*(trained / "text/raw/test.en").read_text().splitlines(), "", "Unknown Words?"]
    shown = run(sys.executable, "-c", ALONE, EXAMPLE, file, stdin="\n".join(lines) + "\n")
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


@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_methods_are_translated_as_by_the_model(structure, make, tmp_path, command, example):
    name, flags, more, dtype = STRUCTURES[structure]
    make(name, **flags)
    model, file = tmp_path / "model.pt", tmp_path / "model.pt2"
    words = ["--format", "torch", "--tokenizer", "none", "--output", file, *more]
    code, out, err = command("export", model, *words)
    assert (code, err) == (0, "") and "of 16 translations equal (random units, beam " in out
    found = example["Model"](str(file))
    lines = ["w1 w2 w3", "", "w5", "w20 w9 w9 w4 w11 unknown w3", *(f"w{3 * i} w{30 - i}" for i in range(8))]
    search = {"beam": found.settings["search"]["beam"], "max_len_a": 0, "max_len_b": found.settings["capacity"] - 1}
    expected = Translator(find_bundle(str(model), tokenizer="none"), cpu=True, **search).translate(lines)
    same = [*map(str.__eq__, found.translate(lines), expected)]
    assert all(same) if dtype == "float32" else sum(same) > 5  # the Translator computes in fp32
    assert len({*expected}) > 3
    types = {entry["name"]: entry["dtype"] for entry in found.settings["programs"]["step"]["inputs"]}
    assert {*types.values()} == {"int64", dtype} and types["words"] == "int64"


def test_tags_of_any_form_stay_whole(tmp_path, capsys, example):
    """In the example, as in translate; the tokenizer for transformers knows two forms, so others are refused."""
    learn_pieces(tmp_path / "spm.model", tokenised_lines(400, 4, 1), vocab_size=120)
    lines = tokenised_lines(20, 4, 2)
    units = dictionary_of(["__de__ <2fr>", *map(text.cutter_of(str(tmp_path / "spm.model")), lines)])
    sizes = {"max_source_positions": 128, "max_target_positions": 128}
    write_model(tmp_path, "prenorm_2l2l_tiny", (units, units), share_all_embeddings=True, **sizes)
    words = [tmp_path / "model.pt", "--tokenizer", "none", "--bpe-codes", tmp_path / "spm.model"]
    given = [f"{tag}{line}" for tag, line in zip(["__de__ ", "<2fr> ", "", ">>nl<< "] * 5, lines)]
    file = tmp_path / "model.pt2"
    assert cli.main(["export", *map(str, [*words, "--format", "torch", "--output", file])]) == 0
    shown = run(sys.executable, "-c", ALONE, EXAMPLE, file, stdin="\n".join(given) + "\n")
    ours = Translator(find_bundle(str(words[0]), tokenizer="none", codes=str(words[-1])), cpu=True)
    assert shown.stdout.split("\n")[:-1] == ours.translate(given)
    assert sorted(example["Model"](str(file)).settings["text"]["tags"]) == ["<2fr>", "__de__"]
    capsys.readouterr()
    words = ["export", *map(str, [*words, "--format", "huggingface", "--output", tmp_path / "out"])]
    assert cli.main(words) == 2 and not (tmp_path / "out").exists()
    assert "would split __de__ of" in capsys.readouterr().err


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
    with zipfile.ZipFile(file) as archive:
        weights = max((each for each in archive.infolist() if "/weights/" in each.filename), key=lambda i: i.file_size)
    content[weights.header_offset + weights.file_size // 2] ^= 1
    (tmp_path / "changed.pt2").write_bytes(content)
    (tmp_path / "cut.pt2").write_bytes(content[: len(content) // 2])
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("a/b", "c")
    for name, problem in (("changed", f"{weights.filename} is damaged"), ("cut", "BadZip"), ("other", ""), ("no", "")):
        told = ends(tmp_path / f"{name}.pt2")
        assert told.startswith(f"cannot load {tmp_path}/{name}.pt2: ") and problem in told
    assert "a line has 30 tokens, and the model has 24 positions: split it" == ends(file, "a " * 30)
