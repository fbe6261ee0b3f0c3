"""Matrix products for decoding on a CPU: each way to compute y = x W^T + b that torch has, from fp32 to fp32.

Each product is of a layer of its own: as many layers take turns as fill 16 MB in fp32, as those of a model do, so that
weights come from where they would come from. GFLOP/s, of the median of all products in several rounds. "int8 ..." are
those of fairseq_deep/core/decoding/int8.py with one scale per row of x; "dynamic ..." are torch's own, with one scale.

    python benchmarks/products.py [--width 256 --vocabulary 8000] [--rows 4 16 64 128 512] [--threads 1] [--rounds 9]
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import nn

from fairseq_deep.core.decoding import describe, int8, packed
from fairseq_deep.core.decoding.bfloat import BfloatLinear
from fairseq_deep.tools import format_table

BYTES = 16e6
WRONG = 0.05
LEAST = 15  # products that a median is of


def in_form(name):
    """fp32, with the weight in the form of that name."""

    def prepare(linear):
        product = packed.FORMS[name](linear.weight)
        return lambda x: product(x, linear.bias)

    return prepare


def bf16_rows(linear):
    layer = BfloatLinear(linear)
    return lambda x: layer.linear(x.bfloat16()).float()


def whole(name):
    """The way of that name, whatever is the fastest."""

    def prepare(linear):
        layer = int8.Int8Linear(linear)
        layer.few = layer.many = int8.PRODUCTS[name](layer.whole, layer.scales, int8.available_kernels().steps)
        return layer

    return prepare


def dynamic(engine, reduce_range=False):
    def prepare(linear):
        torch.backends.quantized.engine = engine
        scales = linear.weight.abs().amax(1) / 127
        zeros = torch.zeros(len(scales), dtype=torch.long)
        quantised = torch.quantize_per_channel(linear.weight, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, linear.bias)
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=reduce_range)

    return prepare


def dynamic_fp16(linear):
    torch.backends.quantized.engine = "fbgemm"
    packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def weight_only(linear):
    scales = linear.weight.abs().amax(1) / 127
    weight = (linear.weight / scales.unsqueeze(1)).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x, weight, scales) + linear.bias


WAYS = {
    "fp32 rows": in_form("rows"),
    "fp32 columns": in_form("columns"),
    "fp32 blocks": in_form("blocks"),
    "bf16 rows": bf16_rows,
    "bf16 blocks": BfloatLinear,
    "dynamic fp16": dynamic_fp16,
    "dynamic fbgemm, 7 bits": dynamic("fbgemm", True),
    "dynamic fbgemm": dynamic("fbgemm"),
    "dynamic onednn": dynamic("onednn"),
    "int8 weights alone": weight_only,
    **{f"int8 {name}": whole(name) for name in int8.PRODUCTS},
    "int8 chosen": int8.Int8Linear,
}


def measure(inputs, outputs, options):
    """GFLOP/s of each way, for each number of rows; and what the ways that are not there say."""
    layers = [nn.Linear(inputs, outputs) for _ in range(max(1, int(BYTES / (4 * inputs * outputs))))]
    ways, absent, times = {}, {}, {}
    for name, prepare in WAYS.items():
        try:
            ways[name] = [prepare(linear) for linear in layers]
            x = torch.randn(32, inputs)
            expected = layers[0](x)
            if float((ways[name][0](x) - expected).norm() / expected.norm()) > WRONG:
                raise RuntimeError("gives wrong sums on this machine")
        except (AttributeError, KeyError, RuntimeError) as error:
            ways.pop(name, None)
            absent[name] = str(error).split("\n")[0][:100]
    rounds = max(options.rounds, LEAST // len(layers))
    for count in options.rows:
        x = torch.randn(count, inputs)
        for turn in range(rounds + 1):
            for name, products in ways.items():
                if name == "int8 weights alone" and turn > 1:
                    continue  # it takes a hundred times as long
                for product in products:
                    start = time.perf_counter()
                    product(x)
                    if turn:  # the first warms up
                        times.setdefault((name, count), []).append(time.perf_counter() - start)
    work = 2e-9 * inputs * outputs
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {name: [count * work / medians[name, count] for count in options.rows] for name in ways}, absent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"width": 256, "vocabulary": 8000, "threads": 1, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 16, 64, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads; {describe()}\n")
    width = options.width
    shapes = [(width, width), (width, 3 * width), (width, 4 * width), (4 * width, width), (width, options.vocabulary)]
    with torch.inference_mode():
        for inputs, outputs in shapes:
            speeds, absent = measure(inputs, outputs, options)
            few, many = int8.choose(outputs, inputs, options.threads) if int8.available_kernels().names else ("-", "-")
            print(f"{inputs} x {outputs}, GFLOP/s; chosen in int8: {few} for few rows, {many} for many")
            head = ("", *(f"{count} rows" for count in options.rows))
            table = [head, *((name, *(f"{speed:.0f}" for speed in row)) for name, row in speeds.items())]
            print(format_table(table, right=range(1, len(head))))
            print("".join(f"{name}: {reason}\n" for name, reason in absent.items()))


if __name__ == "__main__":
    main()
