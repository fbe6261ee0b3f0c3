"""Triton's kernels against torch's operations, by Triton's interpreter on the CPU: all types, odd sizes, whole models.

Kernels of sums are in ``test_running_sums.py``. Other tests compare torch's operations with naive references of DLCL
and of the depth-wise LSTM.
"""

import logging
import sys

import pytest
import torch

from fairseq_deep.core import gpu
from fairseq_deep.core.aggregators import running_sums
from fairseq_deep.core.aggregators.lstm_cell import gated_cell, lstm_cell, norm_gates
from tests.helpers.models import make_batch

DLCL = "transformer_dlcl_6l"
TYPES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu, "on_cpu", True)
    for dtype in TYPES:
        assert gpu.find_kernels(torch.zeros(1, dtype=dtype)) is not None


@pytest.fixture
def ran(interpreted, monkeypatch):
    """The kernels that have run."""
    kernels, seen = gpu.find_kernels(torch.zeros(1)), []
    for name in ("append_row", "append_normed", "pull_normed", "cell_forward"):
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, run=run: seen.append(run.__name__) or run(*args))
    return seen


def without_kernels(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "on_cpu", False)
        return run()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 2, 16), (2, 3, 37)], ids=str)
def test_gates_and_cell_of_kernels_are_those_of_torch(shape, dtype, interpreted, monkeypatch):
    """More positions than programs, too; the gradient of each input."""
    monkeypatch.setattr(gpu.find_kernels(torch.zeros(1)), "PROGRAMS", 4)
    *many, width = shape
    shapes = ((*many, 3 * width), (3, width), (3, width), shape, shape)
    inputs = [torch.randn(each, dtype=torch.float64).to(dtype).requires_grad_() for each in shapes]
    directions = [torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(2)]

    def run():
        outputs = gated_cell(*inputs)
        return [*outputs, *torch.autograd.grad(outputs, inputs, directions)]

    ours = run()
    assert "Fused" in type(gated_cell(*inputs)[0].grad_fn).__name__
    for got, want in zip(ours, without_kernels(run, monkeypatch)):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=8 * TYPES[dtype], atol=8 * TYPES[dtype])


ROWS = ["append_normed", "append_row"]  # of layers, and of the embedding or in the backward pass


@pytest.mark.parametrize("name, flags, expected", [
    (DLCL, {}, ROWS), ("transformer_dlcl_postnorm_6l", {"dlcl_window": 2}, ["append_row"]),
    (DLCL, {"checkpoint_activations": True}, ROWS), (DLCL, {"dlcl_weight_type": "scalar_2"}, []),
    (DLCL, {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}, ["append_row"]),
    ("transformer_lstm_6l", {}, ["cell_forward"]),
], ids=str)  # fmt: skip
def test_models_learn_the_same_with_kernels(name, flags, expected, build, dictionary, ran, monkeypatch):
    """Loss and all gradients, with recomputation, groups of weights (which stay with torch) and LayerDrop."""
    model, batch = build(name, encoder_layers=3, decoder_layers=2, **flags).double().train(), make_batch(dictionary)

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(*batch)[0].log_softmax(-1).square().mean()
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    ours = run()
    assert {*ran} - {"pull_normed"} == {*expected}
    torch.testing.assert_close(ours, without_kernels(run, monkeypatch), rtol=1e-4, atol=1e-7)


def test_without_triton_one_warning_names_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(gpu, "on_cpu", True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "fairseq_deep.core.gpu.kernels", raising=False)
    monkeypatch.delattr(gpu, "kernels", raising=False)
    assert_one_warning(caplog, "triton")


def test_without_a_compiler_one_warning_names_the_reason(interpreted, monkeypatch, caplog):
    """Triton compiles on first use, so a GPU without a C compiler trains with torch's operations."""

    def fail(*args):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(gpu.find_kernels(torch.zeros(1)), "append_row", fail)
    assert_one_warning(caplog, "torch.float32 (Failed to find C compiler. Please specify via CC)")


def test_a_variable_turns_kernels_off(interpreted, monkeypatch, caplog):
    gpu._load.cache_clear()
    monkeypatch.setenv("FAIRSEQ_DEEP_TRITON", "0")
    assert gpu.find_kernels(torch.zeros(2)) is None and not caplog.text
    gpu._load.cache_clear()


def assert_one_warning(caplog, reason):
    gpu._load.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert gpu.find_kernels(torch.zeros(2)) is None and gpu.find_kernels(torch.zeros(2)) is None
    gpu._load.cache_clear()
    assert caplog.text.count("more slowly") == 1 and reason in caplog.text


def test_kernels_are_only_for_tensors_that_they_support(interpreted):
    one, other = torch.zeros(1), torch.zeros(1).half()
    assert gpu.find_kernels(one, other) is None and gpu.find_kernels(torch.zeros(1, dtype=torch.int32)) is None
    assert gpu.find_kernels(torch.zeros(1, device="meta")) is None
    assert type(running_sums.make_sums(torch.zeros(2, 3, 3), torch.zeros(4), 3)).__name__ == "RunningSums"
    inputs = [torch.zeros(shape) for shape in ((1, 1, 6), (3, 2), (3, 2), (1, 1, 2), (1, 1, 2))]
    inputs[-1] = inputs[-1].half()
    expected = lstm_cell(norm_gates(*inputs[:3]), *inputs[3:])
    torch.testing.assert_close(gated_cell(*inputs), expected)
