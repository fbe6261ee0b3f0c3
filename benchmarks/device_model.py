"""What a GPU would do with a model, found without one: kernels, bytes, flops, synchronisations, and a model of the time.

A training step (forward, loss, backward), an update of the optimizer and a step of beam search run on tensors of the
meta device, which have shapes and no values; what decides which kernels run is known of all that is small.

    python benchmarks/device_model.py --arch transformer_dlcl_30l "transformer_dlcl_30l --dlcl-window 5"
    python benchmarks/device_model.py --arch transformer_lstm_6l --what decoding --by-line
"""

import argparse
import json
import shlex
import sys

from device import decoding, model, optimizer, report, training
from device.count import by_line, by_op

from fairseq_deep.registry import UsageError

PHASES = {
    "training": ("forward", "loss", "backward"),
    "optimizer": ("optimizer",),
    "decoding": ("reorder", "model", "generator"),
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs="+", required=True, metavar="ARCH",
                        help="architectures, each with flags of its own if it is quoted with them; flags that are "
                             "not known here are those of all models")  # fmt: skip
    parser.add_argument("--what", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--against", metavar="ARCH", help="the row that has ratio 1 (default: the first)")
    parser.add_argument("--no-stock", action="store_true", help="no rows for fairseq's own transformer")
    parser.add_argument("--precision", choices=list(model.DTYPES), default="fp16")
    parser.add_argument("--optimizer", default="adam", help="a name of fairseq's --optimizer")
    parser.add_argument("--memory-efficient", action="store_true", help="as fairseq's --memory-efficient-fp16")
    numbers = {"tokens": 4096, "length": 256, "sentences": 32, "beam": 4, "step": 20, "words": 32768}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--device", choices=list(report.DEVICES), default="A100-80GB")
    parser.add_argument("--by-op", action="store_true", help="also list the kernels by operation")
    parser.add_argument("--by-line", action="store_true", help="also list the kernels by line of the source")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    return parser.parse_known_args()


def make_rows(options, flags):
    """(name, arguments of a model): the architectures, and before each the stock model of its size if it is new."""
    rows = []
    for text in options.arch:
        arch, *own = shlex.split(text)
        args = model.read_flags(arch, own + flags)
        stock = model.stock_flags(args)
        if not options.no_stock and model.name_of(stock) not in dict(rows):
            rows.append((model.name_of(stock), stock))
        rows.append((text, args))
    return rows


def count(args, options):
    """A :class:`Counter` for each of what is to be counted, and the number of parameters."""
    dictionary = model.make_dictionary(options.words)

    def fresh():
        return model.build(args, dictionary, model.DTYPES[options.precision])

    counters = {}
    if "training" in options.what:
        counters["training"] = training.count_step(fresh(), dictionary, options.tokens, options.length)
    if "optimizer" in options.what:
        counters["optimizer"] = optimizer.count_update(
            fresh(), options.optimizer, options.precision, options.memory_efficient
        )
    if "decoding" in options.what:
        counters["decoding"] = decoding.count_step(
            fresh(), dictionary, options.sentences, options.beam, options.step
        )
    return counters, model.count_parameters(fresh())


def figures(counters, parameters, options):
    device = report.DEVICES[options.device]
    row = {"parameters": parameters}
    for what, counter in counters.items():
        row[what] = report.totals(counter, device)
        row[what]["phases"] = {phase: report.totals(counter, device, [phase]) for phase in PHASES[what]}
        row[what]["by_line"] = [[*where, *rest] for where, *rest in by_line(counter.kernels)]
        row[what]["by_op"] = [list(group) for group in by_op(counter.kernels)]
        row[what]["syncs_by_line"] = report.sync_lines(counter)
    return row


def main():
    options, flags = parse()
    rows = make_rows(options, flags)
    results = {}
    for name, args in rows:
        results[name] = figures(*count(args, options), options)
    against = options.against or next(iter(results))
    if against not in results:
        raise UsageError(f"--against {against} is no row; they are: {', '.join(results)}")
    for what in options.what:
        report.print_totals(what, results, against, PHASES[what])
    for name, result in results.items():
        for what in options.what:
            report.print_details(f"{name}, {what}", result[what], options)
    print("\n" + report.assumptions(options.device))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": {k: v for k, v in vars(options).items()}, "rows": results}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
