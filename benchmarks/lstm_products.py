"""How to multiply in a step of the depth-wise LSTM: four products, one, two, or without the concatenation.

    four        W_i c, W_f c, W_o c and W_h1 c, each by itself
    one, cat    all four matrices below each other, then slices; the matrices are parameters of their own (gates are
                shared, W_h1 is not)
    one         the same, with the four matrices as one parameter (nothing shared)
    two (ours)  the three gates together, and W_h1 c: each norm gets its input in one piece
    no copy     as two, without [Out | A]: W Out + W' A, each half of the weights a parameter of its own
    bare        the matrix products of two, and nothing else

    python benchmarks/lstm_products.py [--device cuda --dtype float16] [--rows 1024 --dim 512]
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F


def finish(gates, x, cell, fc2):
    i, f, o = gates
    cell = cell * f + F.linear(F.glu(x), fc2) * i
    return cell * o


def three_norms(x, dim):
    return torch.sigmoid(F.layer_norm(x.reshape(-1, 3, dim), (dim,))).unbind(1)


def four(w):
    c = torch.cat([w["out"], w["attention"]], -1)
    gates = [torch.sigmoid(F.layer_norm(F.linear(c, part), (w["dim"],))) for part in w["gates"].chunk(3)]
    return finish(gates, F.layer_norm(F.linear(c, w["fc1"]), (4 * w["dim"],)), w["cell"], w["fc2"])


def one_cat(w):
    return one(w, torch.cat([w["gates"], w["fc1"]]))


def one(w, weight=None):
    c = torch.cat([w["out"], w["attention"]], -1)
    weight = w["all"] if weight is None else weight
    x, y = F.linear(c, weight).split([3 * w["dim"], 4 * w["dim"]], -1)
    return finish(three_norms(x, w["dim"]), F.layer_norm(y, (4 * w["dim"],)), w["cell"], w["fc2"])


def two(w):
    c = torch.cat([w["out"], w["attention"]], -1)
    gates = three_norms(F.linear(c, w["gates"]), w["dim"])
    return finish(gates, F.layer_norm(F.linear(c, w["fc1"]), (4 * w["dim"],)), w["cell"], w["fc2"])


def no_copy(w):
    x, y = (
        torch.addmm(F.linear(w["out"], w[name + "_out"]), w["attention"], w[name + "_attention"].t())
        for name in ("gates", "fc1")
    )
    return finish(three_norms(x, w["dim"]), F.layer_norm(y, (4 * w["dim"],)), w["cell"], w["fc2"])


def bare(w):
    c = torch.cat([w["out"], w["attention"]], -1)
    x, y = F.linear(c, w["gates"]), F.linear(c, w["fc1"])
    return x[:, : w["dim"]] + F.linear(y[:, : 2 * w["dim"]], w["fc2"])


def now(options):
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, default=1024, help="positions in the batch")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    dim = options.dim
    shapes = {name: (options.rows, dim) for name in ("out", "attention", "cell")}
    shapes.update(gates=(3 * dim, 2 * dim), fc1=(4 * dim, 2 * dim), fc2=(dim, 2 * dim))
    torch.manual_seed(1)
    w = {name: torch.randn(shape) * (1 if "f" not in name and "g" not in name else shape[1] ** -0.5)
         for name, shape in shapes.items()}  # fmt: skip
    for name in ("gates", "fc1"):
        w[f"{name}_out"], w[f"{name}_attention"] = (part.contiguous() for part in w[name].chunk(2, -1))
    w["all"] = torch.cat([w["gates"], w["fc1"]])
    w = {name: value.to(options.device, getattr(torch, options.dtype)).requires_grad_() for name, value in w.items()}
    w["dim"] = dim

    forms = {"four": four, "one, cat": one_cat, "one": one, "two (ours)": two, "no copy": no_copy, "bare": bare}
    times = {name: ([], []) for name in forms}
    expected = four(w)
    tolerance = 1e-4 if options.dtype == "float32" else 0.1
    for _ in range(options.rounds + 1):
        for name, form in forms.items():
            start = now(options)
            result = form(w)
            middle = now(options)
            result.sum().backward()
            times[name][0].append(middle - start)
            times[name][1].append(now(options) - middle)
            if form is not bare:
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {options.dtype}, "
          f"{options.rows} x {dim}\n")  # fmt: skip
    print(f"{'':12}{'forward ms':>12}{'backward ms':>12}{'sum':>12}")
    for name, (forward, backward) in times.items():
        values = [1e3 * statistics.median(part[1:]) for part in (forward, backward)]
        print(f"{name:12}{values[0]:12.2f}{values[1]:12.2f}{sum(values):12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
