"""Products for decoding, packed, in bf16 and in int8, against their equations: each kernel, and its substitutes."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_deep.core.decoding import bfloat, describe, int8, reduce_precision
from fairseq_deep.core.decoding.linear import BfloatLinear, PackedLinear
from fairseq_deep.core.native import library, load
from tests.helpers.tensors import case

SHAPES = [(1, 1, 8, 8), (3, 5, 16, 33), (1, 128, 40, 7), (2, 60, 256, 96), (2, 3, 1, 10),
          *((1, rows, 100, 33) for rows in (6, 7, 11, 12, 13, 25)),
          *((1, 13, *sizes) for sizes in ((1, 1), (5, 37), (16, 16), (24, 64), (7, 70)))]  # fmt: skip
NAMES = [*([int8.NATIVE] if load() else []), *([int8.FBGEMM] if int8.fbgemm_steps() else [])]
# products in int8: by what, and the steps of x
INT8 = {f"{name}, {steps}": (name, steps) for name in NAMES for steps in int8.INPUT_STEPS
        if (steps == 127 if name == int8.NATIVE else steps <= int8.fbgemm_steps())}  # fmt: skip
WAYS = {**INT8, "packed": (), "bf16": (), "bf16, not in blocks": ()}
there = pytest.mark.skipif(not INT8, reason="this torch has one scale for all rows")


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


def naive(layer, x, way):
    """y = W' x' + b of the rounded weights and inputs, and how near a product of that *way* is to it."""
    weight, x = layer.weight.double(), x.double()
    limit = (1e-5 if way == "packed" else 0.01) * (x.abs() @ weight.abs().t() + 1)
    if "bf16" in way:
        weight, x = weight.bfloat16().double(), x.bfloat16().double()
    elif way != "packed":  # a value half-way between two steps may be rounded either way: a step of one value of x
        s_w, s_x = weight.abs().amax(1, True) / 127, x.abs().amax(-1, keepdim=True) / WAYS[way][1]
        limit = s_x * s_w.t() * 127
        weight, x = s_w * (weight / s_w).round(), s_x * (x / s_x).round()
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.double()), limit


def forced(layer, way, monkeypatch):
    """*layer* as a product of that *way*."""
    if way == "bf16, not in blocks":
        monkeypatch.setattr(bfloat, "in_blocks", lambda weight: weight.no_such_operation)
    if way not in INT8:
        return (PackedLinear if way == "packed" else BfloatLinear)(layer)
    monkeypatch.setattr(int8, "available_kernels", lambda: WAYS[way])
    return int8.Int8Linear(layer)


AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2"}  # fmt: skip


@there
@pytest.mark.skipif(AVX2.items() <= os.environ.items(), reason="this process is held to AVX2")
def test_products_follow_the_equations_with_avx2_only():
    """In a process limited to the instructions of a processor without VNNI; also products of kernels in fp32."""
    native = Path(__file__).with_name("test_native.py::test_the_library_has_the_instructions_that_torch_uses")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, native,
               "-k", "any_form and not bf16 or largest or other_row or library"]
    done = subprocess.run(command, env={**os.environ, **AVX2}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_products_follow_the_equations_for_inputs_of_any_form(way, shape, bias, monkeypatch):
    """In int8, with 127 steps of x where the processor has VNNI, and everywhere with 63, as without."""
    layer, x = case(shape, bias)
    layer.weight[0] *= 30  # a row of its own size must not spoil the others
    x[0, 0] *= 100
    given, product, (expected, limit) = x.clone(), forced(layer, way, monkeypatch), naive(layer, x, way)
    y = product(x)
    assert y.dtype == torch.float32 and torch.equal(x, given)
    assert ((y - expected).abs() / limit).max() < 1.01 and ((y - expected).abs() / limit).mean() < 0.2
    assert way == "packed" or shape[2] == 1 or not torch.equal(y, layer(x))
    for form in (lambda x: x.transpose(0, 1), lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x[0, 0]):
        assert ((product(form(x)) - form(y)).abs() <= form(limit)).all()
    assert product(x[:0]).shape == (0, *y.shape[1:])
    for copied in (copy.deepcopy(product), pickle.loads(pickle.dumps(product))):
        assert torch.equal(copied(x), y)


@there
@pytest.mark.parametrize("way", INT8)
def test_the_largest_sums_do_not_overflow(way, monkeypatch):
    layer = nn.Linear(512, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[1] = -1.0
        for sign in (1.0, -1.0):
            x = torch.full((3, 512), sign)
            expected = sign * torch.tensor([512.0, -512.0, 512.0, 512.0]).expand(3, 4)
            torch.testing.assert_close(forced(layer, way, monkeypatch)(x), expected)


@pytest.mark.parametrize("way", [*INT8, *(["packed"] if load() else [])])
def test_rows_depend_on_no_other_row(way, monkeypatch):
    layer, x = case((1, 60, 48, 20))
    layer.weight.data[3] = 0.0
    product = forced(layer, way, monkeypatch)
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
