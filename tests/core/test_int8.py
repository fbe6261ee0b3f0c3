"""Products in int8 and bf16 against their equations: each kernel of this torch, and its substitutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_deep.core.decoding import bfloat, describe, int8, reduce_precision
from fairseq_deep.core.decoding.linear import PackedLinear
from fairseq_deep.core.native import library, load
from tests.helpers.tensors import case

SHAPES = [(1, 1, 8, 8), (3, 5, 16, 33), (1, 128, 40, 7), (2, 60, 256, 96), (2, 3, 1, 10)]
NAMES = [*([int8.NATIVE] if load() else []), *([int8.FBGEMM] if int8.fbgemm_steps() else [])]
there = pytest.mark.skipif(not NAMES, reason="this torch has one scale for all rows")


def steps_of(name):
    return 127 if name == int8.NATIVE else int8.fbgemm_steps()


@pytest.fixture
def fresh(monkeypatch):
    """No compiled kernels, and nothing that was found out before or in the test is kept."""
    monkeypatch.setattr(library, "enabled", False)
    caches = (int8.fbgemm_steps, bfloat.has_bfloat)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def naive(layer, x, steps):
    """y = s_x s_w (x_q W_q^T) + b, row by row."""
    weight, x = layer.weight.detach().double(), x.double()
    s_w, s_x = weight.abs().amax(1) / 127, x.abs().amax(-1, keepdim=True) / steps
    w_q, x_q = (weight / s_w.unsqueeze(1)).round(), (x / s_x).round()
    return s_x * s_w * (x_q @ w_q.t()) + (0.0 if layer.bias is None else layer.bias.detach().double())


def forced(layer, name, monkeypatch, steps=None):
    """*layer* in int8 by the way with that *name*."""
    monkeypatch.setattr(int8, "available_kernels", lambda: (name, steps or steps_of(name)))
    return int8.Int8Linear(layer)


AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2"}  # fmt: skip


@there
@pytest.mark.skipif(AVX2.items() <= os.environ.items(), reason="this process is held to AVX2")
def test_products_follow_the_equations_with_avx2_only():
    """In a process limited to the instructions of a processor without VNNI; also products of kernels in fp32."""
    native = [Path(__file__).with_name(name) for name in (
        "test_decoding.py::test_products_are_near_for_inputs_of_any_form",
        "test_native.py::test_the_library_has_the_instructions_that_torch_uses")]  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, *native,
               "-k", "each_way or largest or other_row or any_form and packed or library"]
    done = subprocess.run(command, env={**os.environ, **AVX2}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


@there
@pytest.mark.parametrize("name, steps", [(name, n) for name in NAMES for n in int8.INPUT_STEPS if n <= steps_of(name)
                                         and (name, n) != (int8.NATIVE, 63)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_way_follows_the_equation(shape, bias, name, steps, monkeypatch):
    """With 127 steps of x where the processor has VNNI, and everywhere with the 63 steps of a processor without."""
    layer, x = case(shape, bias)
    with torch.no_grad():
        layer.weight[0] *= 30  # a row of its own size must not spoil the others
        x[0, 0] *= 100
        y, expected = forced(layer, name, monkeypatch, steps)(x).double(), naive(layer, x, steps)
        largest, heaviest = x.abs().amax(-1, keepdim=True).double(), layer.weight.abs().amax(1).double()
        # a value half-way between two steps may be rounded either way: a step of one value of x
        assert float(((y - expected).abs() / (largest / steps * heaviest)).max()) < 1.01
        assert float(((y - expected).abs() / (largest / steps * heaviest)).mean()) < 0.02
        # half a step of each value of x, and half a step of each weight, times what they are multiplied with
        rounded = 0.5 * largest / steps * layer.weight.abs().sum(1) + 0.5 * heaviest / 127 * x.abs().sum(-1, True)
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), None if not bias else layer.bias.double())
        assert bool(((y - exact).abs() <= 1.02 * rounded + 0.25 * largest / steps * heaviest / 127).all())


@there
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_sums_do_not_overflow(name, monkeypatch):
    layer = nn.Linear(512, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[1] = -1.0
        for sign in (1.0, -1.0):
            x = torch.full((3, 512), sign)
            expected = sign * torch.tensor([512.0, -512.0, 512.0, 512.0]).expand(3, 4)
            torch.testing.assert_close(forced(layer, name, monkeypatch)(x), expected)


@pytest.mark.parametrize("name", [*NAMES, *(["fp32"] if load() else [])])
def test_rows_depend_on_no_other_row(name, monkeypatch):
    layer, x = case((1, 60, 48, 20))
    layer.weight.data[3] = 0.0
    product = PackedLinear(layer) if name == "fp32" else forced(layer, name, monkeypatch)
    with torch.no_grad():
        alone = torch.cat([product(row) for row in x.view(-1, 1, 48)])
        assert torch.equal(product(x)[0], alone)
        x[0, 0], x[0, 1], x[0, 2], x[0, 3], x[0, 4] = 0.0, 1e30, float("nan"), float("inf"), 1e-42
        y = product(x)[0]
        assert torch.equal(y[5:], alone[5:]) and y[5:, 3].eq(layer.bias[3]).all()
        assert torch.equal(y[0], layer.bias) and torch.allclose(y[4], layer.bias)
        assert bool(torch.isfinite(y[1]).all())
        assert not torch.isfinite(y[2:4]).any()


def test_a_way_that_overflows_or_is_absent_is_not_taken(fresh, monkeypatch):
    def overflows(weight, scales, steps):  # as pairs of products do in 16 bits
        product = original(weight, scales, steps)
        limit = 40.0 * steps / 127
        return lambda x, *rest: product(x, *rest).clamp(-limit * len(x[0]), limit * len(x[0]))

    def absent(weight, scales, steps):
        return torch.ops.quantized.there_is_no_such_operation

    def fails(weight, scales, steps):
        raise RuntimeError("unsupported processor")

    original = int8.by_fbgemm
    for make in (overflows, absent, fails):
        monkeypatch.setattr(int8, "by_fbgemm", make)
        assert not int8._is_right(127, 64)
    assert int8.available_kernels() is None


def test_fewer_steps_where_all_of_them_overflow(fresh, monkeypatch):
    right = int8._is_right
    monkeypatch.setattr(int8, "_is_right", lambda steps: steps == 63 and right(steps))
    if int8.available_kernels() is None:
        pytest.skip("torch has no int8 product for this machine")
    assert int8.available_kernels() == (int8.FBGEMM, 63) and "inputs in 7 bits (63 steps)" in describe()
    layer, x = case((3, 5, 16, 33))
    with torch.no_grad():
        y, expected = int8.Int8Linear(layer)(x).double(), naive(layer, x, 63)
        step = x.abs().amax(-1, keepdim=True).double() / 63 * layer.weight.abs().amax(1).double()
        assert float(((y - expected).abs() / step).max()) < 1.01


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_without_products_one_line_says_so(fresh, monkeypatch, caplog, precision):
    monkeypatch.setattr(int8, "fbgemm_steps", lambda: None)
    times = {"fp32": 3.0, "bf16": 6.1}  # more than twice the time
    monkeypatch.setattr(bfloat, "least_times", lambda *_, **__: times)
    stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert reduce_precision(stack, precision) == 0 and type(stack[0]) is nn.Linear
    assert [record.message for record in caplog.records] == [
        f"this machine or this torch does not have fast {precision} products: they stay in fp32"
    ]
    assert describe().endswith("; int8: none, fp32 instead; bf16: none, fp32 instead")
    times["bf16"] = 5.9
    bfloat.has_bfloat.cache_clear()
    assert bfloat.has_bfloat()
    if precision == "int8":
        with pytest.raises(RuntimeError, match="does not have int8 products"):
            int8.Int8Linear(stack[0])


def test_all_steps_fit_on_a_processor_with_vnni():
    """A wrong product is not used, and nothing else would show it."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or " avx512_vnni" not in flags.read_text():
        pytest.skip("this processor has no VNNI")
    if any(name in os.environ for name in AVX2) or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("held to AVX2, or a torch that may lack a kernel")
    assert int8.fbgemm_steps() == 127
