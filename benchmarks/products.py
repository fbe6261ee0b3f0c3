"""Matrix products for decoding on a CPU: y = x W^T + b by the compiled kernels and by torch, from fp32 to fp32.

Each product is of a layer of its own: as many layers take turns as fill 16 MB in fp32, as those of a model do, so that
weights come from where they would come from. GFLOP/s, of the median of all products in several rounds.

    python benchmarks/products.py [--width 256 --vocabulary 8000] [--rows 4 16 64 128 512] [--threads 1] [--rounds 9]
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import nn

from fairseq_deep.core.decoding import describe, int8
from fairseq_deep.core.decoding.bfloat import BfloatLinear
from fairseq_deep.core.decoding.packed import PackedLinear
from fairseq_deep.tools.tables import format_table

BYTES = 16e6
WRONG = 0.05
LEAST = 15  # products that a median is of


def whole(name):
    """int8 by the way of that name."""

    def prepare(linear):
        steps = 127 if name == int8.NATIVE else int8.fbgemm_steps()
        chosen, int8.available_kernels = int8.available_kernels, lambda: (name, steps)
        try:
            return int8.Int8Linear(linear)
        finally:
            int8.available_kernels = chosen

    return prepare


WAYS = {
    "fp32 torch": lambda linear: linear,
    "fp32 kernels": PackedLinear,
    "bf16 oneDNN": BfloatLinear,
    "int8 FBGEMM": whole(int8.FBGEMM),
    "int8 kernels": whole(int8.NATIVE),
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
            print(f"{inputs} x {outputs}, GFLOP/s")
            head = ("", *(f"{count} rows" for count in options.rows))
            table = [head, *((name, *(f"{speed:.0f}" for speed in row)) for name, row in speeds.items())]
            print(format_table(table, right=range(1, len(head))))
            print("".join(f"{name}: {reason}\n" for name, reason in absent.items()))


if __name__ == "__main__":
    main()
