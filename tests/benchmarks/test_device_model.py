"""benchmarks/device_model.py: it counts right, and what is pinned has not changed without notice.

After a change that is meant: ``python benchmarks/device_model.py --pin``.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_deep.core.registry import UsageError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import device_model  # noqa: E402
from device import compiling, memory, model, optimizer, pins, report, training  # noqa: E402
from device.costs import list_launches  # noqa: E402
from device.count import Counter, Kernel, available, by_op  # noqa: E402

PINNED = pins.read()
pytestmark = pytest.mark.skipif(not available(), reason="the counter needs torch 2.4")


def test_a_layer_by_hand():
    """Two products with their biases, an activation, a norm, a residual connection; then their gradients."""
    with torch.device("meta"):
        layer = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).half()
    counter = Counter()
    with counter:
        x = torch.empty(5, 8, dtype=torch.float16, device="meta", requires_grad=True)
        out = x + layer(x)
        kernels = {op: n for op, n, *_ in by_op(counter.kernels)}
        assert kernels == {"addmm": 2, "native_layer_norm": 1, "relu": 1, "add": 1}
        assert sum(kernel.flops for kernel in counter.kernels) == 2 * 2 * 5 * 8 * 32
        forward = len(counter.kernels)
        out.backward(torch.empty_like(out))
    backward = {op: n for op, n, *_ in by_op(counter.kernels[forward:])}
    # of each product, gradients of weight, bias and input; that of x is a sum of two
    assert backward == {
        "sum": 2, "add": 1, "mm": 4, "threshold_backward": 1, "native_layer_norm_backward": 1
    }  # fmt: skip


def test_bytes():
    """Each operand read, each result written; of a table, the rows that are looked up; expanded tensors once."""
    counter = Counter()
    with counter:
        x, bias = torch.empty(5, 8, dtype=torch.float16, device="meta"), torch.empty(8, device="meta")
        x + bias.half().expand(5, 8)
        F.embedding(torch.empty(3, dtype=torch.long, device="meta"), torch.empty(1000, 8, device="meta"))
        x.fill_(1.0)
        x.mul_(2.0)
    moved = [kernel.bytes for kernel in counter.kernels]
    assert moved == [8 * (4 + 2), 2 * (5 * 8 * 2) + 8 * 2, 2 * 3 * 8 * 4 + 3 * 8, 5 * 8 * 2, 2 * 5 * 8 * 2]


def heads(query, key, value, mask=None, **options):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def backward(run):
    """The kernels of both passes."""
    return lambda *x: run(*x).backward(torch.empty_like(x[0]))


def norm(x, weight):
    return F.rms_norm(x, (8,), weight, 1e-6)


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
COPY = {"copy of an operand": 1}
HEADS, UNEVEN = [(2, 4, 16, 32)] * 3, [(2, 4, 15, 32)] * 3
HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
KERNELS = {
    "views are none": (lambda x: x.view(2, 2, 6).transpose(0, 1)[0].unsqueeze(1).expand(2, 5, 6).detach(),
                       [(4, 6)], HALF, {}),
    "nothing of nothing": (lambda x: x @ x + x, [(0, 0)], HALF, {}),
    # cuBLAS takes rows or columns; a norm and a softmax take rows that follow each other
    "columns": (lambda x, y: x @ y.t(), [(4, 6), (5, 6)], HALF, {"mm": 1}),
    "every second column": (lambda x, y: x @ y[:, ::2], [(4, 6), (6, 10)], HALF, {"mm": 1, **COPY}),
    "norm of a view": (lambda x: F.layer_norm(x.transpose(0, 1), (6,)), [(4, 5, 6)], HALF,
                       {"native_layer_norm": 1, **COPY}),
    "softmax of a view": (lambda x: x.t().softmax(-1), [(4, 5)], HALF, {"_softmax": 1, **COPY}),
    # flash attention without a mask, else the memory-efficient one, which wants masks in rows of 16
    "attention": (lambda *x: heads(*x, is_causal=True, dropout_p=0.1), HEADS, HALF, {FLASH: 1}),
    "attention in fp32": (heads, HEADS, SINGLE, {EFFICIENT: 1}),
    "masked attention": (heads, [*HEADS, (2, 1, 1, 16)], HALF, {EFFICIENT: 1}),
    "masked attention of 15": (heads, [*UNEVEN, (2, 1, 1, 15)], HALF, {EFFICIENT: 1, "constant_pad_nd": 1}),
    # the gradient is not in the layout of the output: batch, positions, heads
    "attention and back": (backward(heads), UNEVEN, HALF, {FLASH: 1, f"{FLASH}_backward": 1, **COPY}),
    "RMSNorm": (norm, [(4, 8), (8,)], HALF, {"native_layer_norm": 1}),
    "RMSNorm and back": (backward(norm), [(4, 8), (8,)], HALF,
                         {"native_layer_norm": 1, "native_layer_norm_backward": 1}),
    "dropout": (lambda x: F.dropout(x, 0.1), [(4, 5)], HALF, {"native_dropout": 1}),
    "no dropout": (lambda x: F.dropout(x, 0.1, training=False), [(4, 5)], HALF, {}),
    "softmax to fp32": (lambda x: F.softmax(x, dim=-1, dtype=SINGLE), [(4, 5)], HALF, {"_softmax": 1}),
    "softmax of bf16": (lambda x: F.softmax(x, dim=-1, dtype=SINGLE), [(4, 5)], BRAIN, {"_to_copy": 1, "_softmax": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_are_those_that_cuda_launches(case):
    run, shapes, dtype, expected = KERNELS[case]
    counter = Counter()
    with counter:
        run(*(torch.empty(shape, dtype=dtype, device="meta", requires_grad="back" in case) for shape in shapes))
    assert {name: count for name, count, *_ in by_op(counter.kernels)} == expected


def test_the_paths_of_cuda_are_left_again():
    x = torch.empty(2, device="meta")
    with pytest.raises(ZeroDivisionError), Counter():
        assert x.is_cuda
        raise ZeroDivisionError
    assert not x.is_cuda and F.dropout.__module__ == "torch.nn.functional"


def test_a_planted_synchronisation_is_reported_with_its_line():
    counter = Counter()
    with counter:
        x = torch.empty(4, 5, device="meta")
        float(x.sum().item())  # here
    (sync,) = counter.syncs
    assert sync.where[2].endswith("# here") and sync.where[0].endswith("tests/benchmarks/test_device_model.py")
    assert sync.line == next(n for n, text in enumerate(open(__file__), 1) if text.strip().endswith("# here"))
    assert not sync.known


def test_what_waits_for_the_device():
    counter = Counter()
    with counter:
        mask = counter.tensor(torch.tensor([True, False, True]))
        x = torch.empty(3, 4, device="meta")
        assert x[mask].shape == (2, 4) and mask.nonzero().shape == (2, 1)
        assert x.masked_select(mask.unsqueeze(1)).shape == (8,)
        assert bool(mask.any()) and torch.equal(mask, mask) and mask.tolist() == [True, False, True]
        x[mask] = 0.0  # a number of the host fills: nobody waits
        x[mask] = torch.zeros((), device="meta")
    names = ["index", "nonzero", "masked_select", "_local_scalar_dense", "equal", "copy to the host", "index_put_"]
    assert [sync.op for sync in counter.syncs] == names
    assert all(sync.known for sync in counter.syncs)


def test_values_are_those_of_the_cpu():
    """Through views, in-place operations, conversions and new orders; forgotten where something unknown is written."""

    def run(start, order):
        tokens = torch.zeros(4, 6, device=start.device).long().fill_(7)
        tokens[:, :3] = start
        tokens.view(2, 2, 6)[:, :, 4] = tokens[:, 0].view(2, 2) + 1
        tokens[:, :4] = tokens[:, :4].index_select(0, order)
        return tokens, tokens.eq(7).any(1).long().cumsum(0) + torch.arange(4, device=start.device)

    start, order = torch.arange(12).view(4, 3), torch.tensor([2, 2, 0, 1])
    counter = Counter()
    with counter:
        results = run(counter.tensor(start), counter.tensor(order))
        for result, expected in zip(results, run(start, order)):
            assert torch.equal(counter.values.get(result), expected)
        results[0][1] = torch.empty(6, dtype=torch.long, device="meta").random_()
        assert counter.values.get(results[0]) is None


def test_launches_of_lists():
    """At most 320 chunks of 65,536 elements, and 36 tensors where four lists go together."""
    lists = lambda count, elements: [[torch.empty(elements, device="meta")] * count] * 4  # noqa: E731
    assert list_launches(lists(36, 10)) == 1
    assert list_launches(lists(37, 10)) == 2
    assert list_launches(lists(1, 320 * 65536)) == 1
    assert list_launches(lists(1, 321 * 65536)) == 2
    assert list_launches(lists(2, 320 * 65536)) == 2


def test_model_time():
    """A kernel takes what is longest: its launch, its bytes or its flops."""
    device = report.Device(launch=2.0, bandwidth=10.0, half=100.0, single=50.0)
    kernel = Kernel("", 0, 0, True, "", ("", "", ""), 0)
    times = [(kernel, 2), (kernel._replace(bytes=30), 3), (kernel._replace(flops=400), 4)]
    times.append((kernel._replace(flops=400, half=False), 8))
    for one, seconds in times:
        assert report.model_time([one], device) == seconds
    assert report.model_time([one for one, _ in times], device) == 17


def test_backward_belongs_to_the_line_of_its_forward():
    def twice(x):
        return x * 2.0  # the line

    counter = Counter()
    with counter:
        x = torch.empty(3, device="meta", requires_grad=True)
        y = twice(x)
        counter.phase = "backward"
        y.backward(torch.empty_like(y))
    assert [(kernel.phase, kernel.where[2]) for kernel in counter.kernels] == [
        ("", "return x * 2.0  # the line"), ("backward", "return x * 2.0  # the line")
    ]  # fmt: skip


@pytest.mark.skipif(not compiling.available(), reason="torch has no inductor with rules for a GPU")
def test_fusion():
    """A norm before a product, activation, dropout and residual connection behind it: three kernels."""

    def run(x, weight, bias):
        return x + F.dropout(torch.relu(F.linear(F.layer_norm(x, (64,)), weight, bias)), 0.1)

    counter = Counter()
    with counter, compiling.counted(counter) as fusion:
        tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((5, 64), (64, 64), (64,))]
        compiled = torch.compile(run, dynamic=True)
        for counter.counts in (False, True):
            out = compiled(*tensors)
    assert (fusion.graphs, fusion.unfused, fusion.calls) == (2, 0, 1) and out.shape == (5, 64)
    ops = [kernel.op for kernel in counter.kernels if kernel.op != "low_out"]  # which is the seed of dropout
    assert ops == ["fused", "addmm", "fused"]
    assert sum(kernel.flops for kernel in counter.kernels) == 2 * 5 * 64 * 64
    assert counter.kernels[0].where[2].startswith("return x + F.dropout")


def small(arch, *flags):
    args = model.read_flags(arch, [*pins.SMALL, "--decoder-attention-heads", "2", *flags])
    return args, model.make_dictionary(1000)


def test_recomputation_is_counted():
    """The kernels of the layers' forward pass once more, and less memory."""
    counts, peaks = [], []
    for flags in ((), ("--checkpoint-activations",)):
        args, dictionary = small("transformer_prenorm_6l", *flags)
        counter = training.count_step(model.build(args, dictionary, torch.float16), dictionary, 256, 16)
        counts.append(report.totals(counter))
        peaks.append(memory.peak_of_step(model.build(args, dictionary, torch.float16), dictionary, 256, 16))
    products = [count["flops"] for count in counts]
    forward = products[0] / 3  # a backward pass has two products for each of the forward pass
    projection = 2 * 256 * 64 * 1000  # which is not done again
    assert products[1] == pytest.approx(products[0] + forward - projection, rel=0.05)
    assert peaks[1] < 0.8 * peaks[0]


def test_memory_by_hand():
    alive = memory.Alive()
    with alive:
        x = torch.empty(1000, device="meta")  # 4,096 bytes
        y = x + 1
        z = y.view(10, 100).t()
        del x, y
        assert (alive.now, alive.peak) == (4096, 8192)
        z = z * 2
        assert (alive.now, alive.peak) == (4096, 8192)
    args, dictionary = small("transformer_prenorm_6l")
    built = model.build(args, dictionary, torch.float16)
    # half a parameter, a flat copy of it and of its gradient, and two moments in fp32
    state = memory.state_bytes(built, "adam", "fp16", False)
    assert state == pytest.approx(18 * model.count_parameters(built), rel=0.01)


def test_the_largest_batch_fits_and_the_next_does_not():
    args, dictionary = small("transformer_prenorm_6l")
    fresh = lambda: model.build(args, dictionary, torch.float16)  # noqa: E731
    capacity = 1.5e9
    fixed, word, (words,) = memory.largest_batch(fresh, dictionary, [capacity], length=32)
    needed = [
        memory.CONTEXT + memory.state_bytes(fresh(), "adam", "fp16", False)
        + memory.peak_of_step(fresh(), dictionary, count, 32)
        for count in (words, words + 64)
    ]  # fmt: skip
    assert needed[0] <= capacity * 1.001 and needed[1] > capacity * 0.999
    assert memory.largest_batch(fresh, dictionary, [1e9], length=32)[2] == [0]


@pytest.mark.filterwarnings("ignore:amp_C")
def test_updates_of_the_optimizer():
    """fairseq's Adam: one flat copy in fp16, each parameter by itself in bf16; none of them asks for each parameter."""
    args, dictionary = small("transformer_prenorm_6l")
    counts = {}
    for precision in ("fp16", "bf16", "fp32"):
        built = model.build(args, dictionary, model.DTYPES[precision])
        tensors = len(list(built.parameters()))
        counter = optimizer.count_update(built, "adam", precision)
        counts[precision] = len(counter.kernels) / tensors
        assert len(counter.syncs) <= 4
    assert 2 <= counts["fp16"] < 2.5 and counts["bf16"] > 10 and counts["fp32"] > 7


PINS = [(name, step) for name in pins.SYSTEMS for step in pins.STEPS]


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED["torch"], reason="another torch has other operations under the same code"
)
@pytest.mark.parametrize(("name", "step"), PINS, ids=map("-".join, PINS))
def test_kernels_and_synchronisations_are_pinned(name, step):
    """A change that adds some, or takes some away, is named with its line."""
    counter, pinned = pins.count(name, step), PINNED[f"{name} {step}"]
    changes = [
        f"{now} kernels, were {before}: {file} {function}: {text}"
        for (file, function, text), before, now in report.changed_lines(pinned["lines"], pins.lines(counter))
    ]
    waits = pins.waits(counter)
    changes += [f"waits for the device: {wait}" for wait in waits if wait not in pinned["waits"]]
    changes += [f"no longer waits for the device: {wait}" for wait in pinned["waits"] if wait not in waits]
    cure = "if it is meant: python benchmarks/device_model.py --pin"
    assert not changes, "\n".join([f"{name}, {step}: kernels by line have changed ({cure})", *changes])


def test_a_change_is_named_with_its_line():
    before = [["a.py", "f", "x + y", 2], ["a.py", "g", "x * y", 1]]
    now = [["a.py", "f", "x + y", 5], ["a.py", "h", "x - y", 1]]
    changes = report.changed_lines(before, now)
    assert changes == [(("a.py", "f", "x + y"), 2, 5), (("a.py", "g", "x * y"), 1, 0), (("a.py", "h", "x - y"), 0, 1)]
    assert report.changed_lines(now, now) == []


SMALL = [*pins.SMALL, "--decoder-attention-heads", "2", "--words", "1000", "--tokens", "64", "--length", "16"]
SMALL += ["--sentences", "3", "--step", "4", "--arch", "transformer_prenorm_6l"]


def test_the_tables(tmp_path, capsys):
    """Stock's row first; kernels by line where asked for; JSON that a later run is compared with."""
    path = str(tmp_path / "counts.json")
    assert device_model.main([*SMALL, "--json", path, "--what", "training", "decoding"]) == 0
    printed = capsys.readouterr().out
    tables = printed.strip().split("\n\n")
    assert [table.split("\n")[1].split("  ")[0] for table in tables[:4]] == ["stock pre-norm 2 + 2"] * 4
    assert "waits for the device" in printed and "bytes / bandwidth" in printed
    flags = ["--dropout", "0", "--what", "training", "--no-stock", "--compare", path]
    assert device_model.main([*SMALL, *flags]) == 0
    assert "return fast_dropout(x, self.p) if self.fast" in capsys.readouterr().out
    assert device_model.main([*SMALL, "--no-stock", "--memory", "--device", "V100"]) == 0
    assert "with recomputation" in capsys.readouterr().out


def test_measuring_runs_on_a_cpu(capsys, tmp_path):
    flags = ["--no-stock", "--measure", "cpu", "--precision", "fp32", "--json", str(tmp_path / "rows.json")]
    assert device_model.main([*SMALL, *flags]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"].values()
    step = row["measured"]["training"]
    assert sum(launches for launches, _ in step["names"].values()) == step["kernels"]
    assert all(time >= 0 for _, time in step["names"].values())
    rows = [line.split() for line in capsys.readouterr().out.split("measured: CPU")[1].split("\n")[1:4]]
    assert [row[1] for row in rows] == ["training", "optimizer", "decoding"]
    # a time is a difference of two measurements, which a busy machine may turn round
    assert all(math.isfinite(float(row[2])) and int(row[7].replace(",", "")) > 0 for row in rows)


@pytest.mark.parametrize("arguments, message", [
    (["--arch", "transformer_prenrom_6l"], "did you mean transformer_prenorm_6l"),
    ([*SMALL, "--against", "transformer_dlcl_6l"], "is no row"),
    ([*SMALL, "--optimizer", "adma", "--what", "optimizer"], "unknown optimizer adma"),
    ([], "--arch"),
    ([*SMALL, "--compile"], "add --what training"),
    ([*SMALL, "--measure"], "sees no GPU"),
], ids=["arch", "against", "optimizer", "nothing", "compile", "measure"])  # fmt: skip
def test_bad_input(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        device_model.main(arguments)
