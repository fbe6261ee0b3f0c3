"""``fairseq-deep export``: what a format lacks, cannot be written or differs from the model is one line."""

import importlib.util
import sys

import pytest
import torch

from fairseq_deep.runtime.engines import ct2_engine, transformers_engine
from fairseq_deep.tools import torch_format
from tests.errors import assert_says, read_model, rows

needs = [pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
         for name in ("ctranslate2", "transformers")]  # fmt: skip
CT2, HF = (lambda *row, mark=mark: pytest.param(*row, marks=mark) for mark in needs)
DIFFER = "log-probabilities differ from the model's (by up to "
OTHER = "translations differ from the model's for 2 of 2 sentences"


def failing(*words, **more):
    raise OSError(28, "No space left on device")


def untraceable(*words, **more):
    raise RuntimeError("no rule for this\nor that")


def scaled(engine):
    """A row: log-probabilities that are a thousandth larger."""
    real = engine.log_probabilities
    return engine, "log_probabilities", lambda *words: 1.001 * real(*words), DIFFER


@pytest.fixture
def fails(make, tmp_path, refused):
    """fails(FORM, WORD, ...): the line of an export, which leaves nothing."""
    make("prenorm_6l", encoder_layers=1, decoder_layers=1)
    (tmp_path / "text").write_text("w1 w2\nw3\n")

    def fails(form, *words):
        before = sorted(tmp_path.iterdir())
        output = tmp_path / ("out.pt2" if form == "torch" else "out")
        words = ["--format", form, "--tokenizer", "none", "--output", output, *words]
        line = refused("export", tmp_path / "model.pt", *words)
        assert sorted(tmp_path.iterdir()) == before
        return line

    return fails


@pytest.mark.parametrize("form, place, name, value, problem", [
    CT2("ctranslate2", "ctranslate2.specs.TransformerSpec", "save", failing, "/out: No space left on device"),
    CT2("ctranslate2", "ctranslate2", "__version__", "4.6.1", "ctranslate2 4.6.1 is too old; pip install"),
    CT2("ctranslate2", *scaled(ct2_engine.Ct2Engine)),
    CT2("ctranslate2", ct2_engine.Ct2Engine, "_hypotheses", lambda *_: [{"tokens": torch.tensor([5, 2])}], OTHER),
    HF("huggingface", *scaled(transformers_engine.TransformersEngine)),
    HF("huggingface", transformers_engine, "ended", lambda row: row[1:3], OTHER),
    HF("huggingface", transformers_engine.TokenizerDictionary, "encode", lambda *_: torch.tensor([5, 6, 2]),
       "the tokenizer for transformers splits a sentence differently ("),
    ("torch", *scaled(torch_format.Programs)),
    ("torch", torch_format.Programs, "translate", lambda _, rows: ([[{"tokens": torch.tensor([5, 2])}]] * len(each)
                                                                   for each in rows), OTHER),
    ("torch", torch.export, "export", untraceable, "model.pt: no rule for this"),
])  # fmt: skip
def test_an_export_that_fails_leaves_nothing(form, place, name, value, problem, fails, tmp_path, monkeypatch):
    monkeypatch.setattr(*((f"{place}.{name}", value) if isinstance(place, str) else (place, name, value)))
    assert problem in fails(form, "--verify", tmp_path / "text")


@pytest.mark.parametrize("form, module, problem", [
    ("ctranslate2", "ctranslate2.specs", "ctranslate2 is not installed ("),
    ("huggingface", "transformers", "transformers is not installed ("),
    ("torch", "torch.export.pt2_archive", f"requires torch 2.8 or newer, but this is {torch.__version__}: pip"),
])  # fmt: skip
def test_a_missing_package_is_named(form, module, problem, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert problem in fails(form)


@pytest.mark.parametrize("_, words, said", rows("exports"))
def test_a_structure_that_a_format_lacks_is_refused(_, words, said, make, refused, tmp_path, monkeypatch):
    form, _, model = words.partition(" ")
    name, flags = read_model(model)
    path = make(name, **flags)[1] / "model.pt"
    if name.startswith("admin"):
        state = torch.load(path, weights_only=False)
        for key, value in state["model"].items():
            if ".residual." in key:
                value.uniform_(0.5, 2.0)
        torch.save(state, path)
    for module in ("ctranslate2", "ctranslate2.specs", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    tokens = [] if form == "fairseq" else ["--tokenizer", "none"]
    line = refused("export", path, "--format", form, "--output", tmp_path / "out", *tokens)
    assert_says(line.removeprefix(f"fairseq-deep export: {path} has "), said)
    assert not (tmp_path / "out").exists()
