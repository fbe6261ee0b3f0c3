"""``--compile`` in fairseq's own commands, with the real compiler and without one."""

import re

import pytest
import torch

from fairseq_deep.plugin.models.compiling import why_not
from tests.helpers.commands import EXACT, PACKAGE, losses, run, train_command

FLAGS = (*EXACT, "--max-update", "3")
ARCH = "transformer_prenorm_2l2l_tiny"


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    return run(*train_command(data, tmp_path_factory.mktemp("plain"), *FLAGS, arch=ARCH))


def norms(done):
    """The norm of all gradients in each update, as logged."""
    return [float(norm) for norm in re.findall(r'"gnorm": "([\d.]+)"', done.stdout + done.stderr)]


def test_training_compiles_and_generation_does_not(data, tmp_path, plain):
    if why_not(torch.device("cpu"), "inductor") is not None:
        pytest.skip("there is no compiler")
    done = run(*train_command(data, tmp_path, *FLAGS, "--compile", arch=ARCH))
    assert losses(done) == pytest.approx(losses(plain), abs=2e-3)
    assert len(norms(done)) >= 3 and norms(done) == pytest.approx(norms(plain), abs=2e-3)
    [said] = re.findall(r"--compile: .*", done.stdout + done.stderr)
    assert re.fullmatch(r"--compile: compiled [1-9]\d* functions; the first step took [\d.]+ s", said)
    generated = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu")
    assert "--compile" not in generated.stdout + generated.stderr
    assert len(re.findall(r"^H-", generated.stdout, re.MULTILINE)) == 30


def test_without_a_compiler_one_line_says_so(data, tmp_path, plain, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = run(*train_command(data, tmp_path, *FLAGS, "--compile", arch=ARCH), real=True)  # torch reads CXX early
    assert losses(done) == losses(plain)
    [said] = re.findall(r"--compile .*", done.stdout + done.stderr)
    assert said.startswith("--compile has no effect here; training continues without it: ") and "compiler" in said
