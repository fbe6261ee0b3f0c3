"""What a GPU would do with a model, found without one: kernels, bytes, flops, synchronisations and a model time.

A training step (forward, loss, backward), an update of the optimizer and a step of beam search run on tensors of the
meta device, which have shapes and no values; the few values that decide which kernels run are known.

    python benchmarks/device_model.py --arch transformer_prenorm_30l transformer_dlcl_30l "transformer_dlcl_30l --dlcl-window 5"
    python benchmarks/device_model.py --arch transformer_lstm_6l --what decoding --by-line --json after.json --compare before.json
    python benchmarks/device_model.py --arch transformer_dlcl_30l --memory
    python benchmarks/device_model.py --pin      # what tests/benchmarks/test_device_model.py holds against
"""  # noqa: E501

import argparse
import json
import logging
import shlex
import sys
import warnings

import torch
from device import decoding, measure, memory, model, optimizer, pins, report, training
from device.count import available, by_line, by_op

from fairseq_deep.core.registry import UsageError

PHASES = {
    "training": ("forward", "loss", "backward"),
    "optimizer": ("optimizer",),
    "decoding": ("reorder", "model", "generator"),
}


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="Flags of models that are not known here go to all of them.",
    )
    parser.add_argument("--arch", nargs="+", default=[], metavar="ARCH",
                        help="architectures; in quotes with flags of its own")  # fmt: skip
    parser.add_argument("--what", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--against", metavar="ARCH", help="the row that has ratio 1 (default: the first)")
    parser.add_argument("--no-stock", action="store_true", help="no rows for fairseq's own transformer")
    parser.add_argument("--precision", choices=list(model.DTYPES), default="fp16")
    parser.add_argument("--optimizer", default="adam", help="a name of fairseq's --optimizer")
    parser.add_argument("--memory-efficient", action="store_true", help="as fairseq's --memory-efficient-fp16")
    numbers = {"tokens": 4096, "length": 256, "sentences": 32, "beam": 4, "step": 20, "words": 32768}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--device", nargs="+", choices=list(report.DEVICES), default=["A100", "H100"])
    parser.add_argument("--compile", action="store_true",
                        help="also training steps as torch.compile makes them")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="the largest batches that fit, and nothing else")
    parser.add_argument("--measure", nargs="?", const="cuda", choices=["cuda", "cpu"],
                        help="also measure, on this device, and tell how far the model was off")  # fmt: skip
    parser.add_argument("--by-op", action="store_true", help="also list the kernels by operation")
    parser.add_argument("--by-line", action="store_true", help="also list the kernels by line of the source")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--compare", metavar="FILE", help="list the lines whose kernels are not those of this JSON")
    parser.add_argument("--pin", action="store_true", help="write the counts that the tests hold against")
    return parser.parse_known_args(arguments)


def make_rows(options, flags):
    """(flags of a model, whether it is compiled) by name; before each architecture stock of that size if new."""
    rows = {}
    for text in options.arch:
        arch, *own = shlex.split(text)
        args = model.read_flags(arch, own + flags)
        stock = model.stock_flags(args)
        if not options.no_stock:
            rows.setdefault(model.name_of(stock), (stock, False))
        rows[text] = args, False
        if options.compile:
            rows[f"{text}, compiled"] = argparse.Namespace(**{**vars(args), "compile": True}), True
    return rows


def builder(args, dictionary, options):
    return lambda: model.build(args, dictionary, model.DTYPES[options.precision])


def count(fresh, dictionary, options, compiles):
    """A :class:`Counter` for each of what is to be counted."""
    counters = {}
    for what in options.what:
        if what == "training":
            counters[what] = training.count_step(fresh(), dictionary, options.tokens, options.length, compiles)
        elif what == "optimizer":
            chosen = options.optimizer, options.precision, options.memory_efficient
            counters[what] = optimizer.count_update(fresh(), *chosen)
        else:
            counters[what] = decoding.count_step(fresh(), dictionary, options.sentences, options.beam, options.step)
    return counters


def figures(counters, model_, options):
    """All that the tables print and JSON holds of one row."""
    row = {"parameters": model.count_parameters(model_)}
    for what, counter in counters.items():
        row[what] = report.totals(counter)
        row[what]["phases"] = {phase: report.totals(counter, [phase]) for phase in PHASES[what]}
        row[what]["by_line"] = [[*where, *rest] for where, *rest in by_line(counter.kernels)]
        row[what]["by_op"] = [list(group) for group in by_op(counter.kernels)]
        row[what]["syncs_by_line"] = report.sync_lines(counter)
    if "training" in row:
        row["training"]["flops_on_paper"] = model.training_flops(model_, options.tokens, options.length)
    if "decoding" in row:
        rows = options.sentences * options.beam
        row["decoding"]["flops_on_paper"] = model.decoding_flops(model_, rows, options.step, decoding.LENGTH)
    return row


def fitting_batches(args, fresh, dictionary, options):
    """The row of the table of memory, with and without recomputation."""
    row = {}
    for key, recomputes in (("memory", False), ("memory_recomputed", True)):
        args.checkpoint_activations = recomputes
        chosen = options.optimizer, options.precision, options.memory_efficient
        row[key] = memory.largest_batch(fresh, dictionary, report.CAPACITIES.values(), options.length, *chosen)
    return row


def measured(name, args, dictionary, options):
    """Time and launches of each of what is counted, on a real device; printed at once, for time there may be short."""
    device, row = options.measure, {}
    dtype = model.DTYPES[options.precision]
    for what in options.what:
        built = model.build(args, dictionary, dtype, device)
        if what == "training":
            row[what] = measure.measure_training(built, dictionary, device, options.tokens, options.length)
        elif what == "optimizer":
            chosen = options.optimizer, options.precision, options.memory_efficient
            row[what] = measure.measure_update(built, device, *chosen)
        else:
            chosen = options.sentences, options.beam, options.step
            row[what] = measure.measure_decoding(built, dictionary, device, *chosen)
        found = row[what]
        busy = f"the GPU busy {1e3 * found['busy']:.2f} ms, " if device == "cuda" else ""
        print(f"{name}, {what}: {1e3 * found['seconds']:.2f} ms, {busy}{found['kernels']:,.0f} launches", flush=True)
    return row


def store(results, options, flags):
    """Write all figures so far to the file of ``--json``."""
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({"options": vars(options), "flags": flags, "rows": results}, file, indent=1)


def print_all(results, against, options):
    if options.memory:
        report.print_memory(results)
        return
    for what in options.what:
        report.print_totals(what, results, against, PHASES[what], options.device)
        if what != "optimizer":
            report.print_floors(what, results, options.device)
    if options.measure:
        report.print_measured(options.what, results, against, measure.device_name(options.measure))
    report.print_syncs(options.what, results)
    for name, result in results.items():
        for what in options.what:
            report.print_groups(f"{name}, {what}", result[what], options)


def compare(results, path, options):
    with open(path, encoding="utf-8") as file:
        before = json.load(file)["rows"]
    for name in (name for name in results if name in before):
        for what in (what for what in options.what if what in before[name]):
            changes = report.changed_lines(before[name][what]["by_line"], results[name][what]["by_line"])
            report.print_changes(f"{name}, {what}", changes)


def main(arguments=None):
    options, flags = parse(arguments)
    logging.getLogger("fairseq_deep").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")  # what torch has to say about fairseq's own calls
    if not available():
        raise UsageError(f"torch {torch.__version__} does not tell what a backward pass is of: use torch 2.4 or newer")
    if options.pin:
        return pins.write()
    if not options.arch:
        raise UsageError("name what is to be counted: --arch ARCH ...")
    if options.measure == "cuda" and not torch.cuda.is_available():
        raise UsageError("--measure: torch sees no GPU here; leave it out, or try --measure cpu")
    rows = make_rows(options, flags)
    against = options.against or next(iter(rows))
    if against not in rows:
        raise UsageError(f"--against {against} is no row; they are: {', '.join(rows)}")
    if options.compile and options.what != ["training"]:
        raise UsageError("--compile is of training steps: add --what training")
    results, dictionary = {}, model.make_dictionary(options.words)
    for name, (args, compiles) in rows.items():
        fresh = builder(args, dictionary, options)
        if options.memory:
            results[name] = fitting_batches(args, fresh, dictionary, options)
        else:
            results[name] = figures(count(fresh, dictionary, options, compiles), fresh(), options)
        if options.measure:
            results[name]["measured"] = measured(name, args, dictionary, options)
        if options.json:
            store(results, options, flags)
    print_all(results, against, options)
    if options.compare:
        compare(results, options.compare, options)
    report.print_assumptions(options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
