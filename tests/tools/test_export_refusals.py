"""``fairseq-deep export``: structures that a format lacks are refused in one line, without the format's package."""

import sys

import pytest
import torch

from tests.errors import assert_says, read_model, rows


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


@pytest.mark.parametrize("form", ["ctranslate2", "huggingface"])
def test_an_adaptive_softmax_requires_fairseq(form, make, refused, tmp_path):
    path = make("prenorm_6l", adaptive_softmax_cutoff="10,20", criterion="adaptive_loss")[1] / "model.pt"
    line = refused("export", path, "--format", form, "--output", tmp_path / "out", "--tokenizer", "none")
    assert "--adaptive-softmax-cutoff requires fairseq" in line
