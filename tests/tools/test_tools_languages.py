"""Models with LaLN and LaLT, packaged and exported."""

import pytest
import torch

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.plugin.stored import as_checkpoint
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.tools import main
from tests.helpers.exports import write_model
from tests.helpers.models import make_batch, make_dictionary, make_tagged_dictionary, task_of

FLAGS = {"language_norm": True, "language_transform": True, "decoder_layers": 2}


def write(folder, name, **flags):
    dictionaries = make_tagged_dictionary(38, 6), make_dictionary(30)
    return write_model(folder, name, dictionaries, **{**FLAGS, **flags}), dictionaries


def test_a_package_translates_as_the_checkpoint(tmp_path):
    model, dictionaries = write(tmp_path, "matt_6l")
    package = tmp_path / "package"
    assert main.main(["package", str(tmp_path / "model.pt"), "--tokenizer", "none", "--output", str(package)]) == 0
    lines, search = ["<2l0> w1 w2 w3", "<2l5> w1 w2 w3", "w1 w2 w3"], {"beam": 3, "nbest": 3, "cpu": True}
    bundles = find_bundle(str(tmp_path / "model.pt"), tokenizer="none"), find_bundle(str(package))
    want, got = (Translator([bundle], **search).translate_nbest(lines) for bundle in bundles)
    assert got == want and len({best.score for best, *_ in want}) == 3
    # for fairseq's commands
    state = as_checkpoint(str(package / "model.safetensors"))
    copy = DeepTransformerModel.build_model(state["cfg"]["model"], task_of(*dictionaries)).eval()
    copy.load_state_dict(state["model"])
    source, lengths, target = make_batch(dictionaries[1], (4, 4, 4))
    source[:, 0] = torch.tensor([dictionaries[0].index(tag) for tag in ("<2l0>", "<2l5>", "w1")])
    assert torch.equal(copy(source, lengths, target)[0], model(source, lengths, target)[0])


@pytest.mark.parametrize("form", ["fairseq", "ctranslate2", "huggingface"])
@pytest.mark.parametrize("flag", ["--language-transform", "--language-norm"])
def test_formats_that_have_no_such_parts(flag, form, tmp_path, capsys):
    write(tmp_path, "postnorm_6l", language_transform=flag == "--language-transform")
    capsys.readouterr()
    words = ["export", str(tmp_path / "model.pt"), "--format", form, "--output", str(tmp_path / "out")]
    assert main.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"model.pt has {flag} (encoder), which " in error
    assert not (tmp_path / "out").exists()
