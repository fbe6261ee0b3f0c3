"""``--task deep_translation --decode-precision``: applied when the model is loaded, to any model of this package."""

import re

import pytest

from fairseq_deep.core.native import load
from tests.helpers.commands import PACKAGE, hypotheses, run, train_command

ARCHITECTURES = {
    "transformer_dlcl_2l2l_tiny": (),
    "transformer_lstm_2l2l_tiny": ("--decoder-attn", "merged"),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trained(request, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    run(*train_command(data, folder, "--max-epoch", "8", *ARCHITECTURES[request.param], arch=request.param))
    return folder / "checkpoint_last.pt"


def generate(data, path, *flags, program="fairseq-generate", **options):
    words = (data, "--user-dir", PACKAGE, "--path", path, "--cpu", "--beam", "3", "--max-len-b", "12", *flags)
    return run(program, *words, **options)


def similar(first, second):
    return sum(a == b for a, b in zip(first, second)) / len(first)


def test_precision_changes_little_and_the_checkpoint_nothing(data, trained):
    before = trained.read_bytes()
    plain = hypotheses(generate(data, trained))
    for precision in ("fp32", "bf16", "int8"):
        done = generate(data, trained, "--task", "deep_translation", "--decode-precision", precision)
        assert (f"decoder linear layers in {precision}" in done.stderr) == (precision != "fp32")
        of_encoder = "bf16" if precision == "int8" and load() is None else precision
        named = re.findall(r"encoder linear layers in (\w+)", done.stderr)
        assert named == [of_encoder] * (precision != "fp32")
        share = similar(hypotheses(done), plain)
        assert share == 1.0 if precision == "fp32" else share > 0.6
    assert trained.read_bytes() == before


def test_fairseq_interactive_takes_it(data, trained):
    flags = ("--task", "deep_translation", "--decode-precision", "int8", "-s", "src", "-t", "tgt")
    done = generate(data, trained, *flags, program="fairseq-interactive", stdin="1 2 3\n4 5\n")
    assert len(hypotheses(done)) == 2


def test_an_unknown_precision_is_refused(data, trained):
    done = generate(data, trained, "--task", "deep_translation", "--decode-precision", "int4", check=False)
    assert done.returncode != 0 and "int4" in done.stderr
