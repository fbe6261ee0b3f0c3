"""measure gradients, variances and streams of an untrained or trained model on a real batch

The command reports the gradient norm of each layer (Fig. 1 of Zhang et al., 2019). For layers with residual
connections, it reports Var(r), beta_LN, beta_RC and beta of each sub-layer (their Table 1). For each residual stream,
it reports the standard deviation and the share of the variance between the positions of a sentence (0: all positions
are equal). The loss is the cross entropy in nats, averaged over target tokens. The source gain is the increase of the
loss with the sources of other sentences (0: the source is ignored). There is no optimizer step, and all computation is
in fp32.
"""

import argparse
import json
import logging
import os
import platform
import sys
from itertools import zip_longest
from typing import Any

import torch

import fairseq_deep
from fairseq_deep.errors import UsageError
from fairseq_deep.tools import pictures
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.checkpoints import check_fairseq
from fairseq_deep.tools.measuring import RATIOS, SIDES, fresh, mean_of, measure, trained
from fairseq_deep.tools.output_files import check_outputs, write_text
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep diagnose data-bin --path checkpoints/checkpoint_best.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add data, models, measuring conditions and outputs; other flags are passed to fairseq."""
    parser.add_argument("data", metavar="DATA_BIN", help="binarised data; must precede fairseq's flags")
    parser.add_argument(
        "--arch", action="append", default=[], metavar="NAME",
        help="untrained model, repeatable; in quotes, with its own fairseq flags: 'NAME --deep-init ds'",
    )  # fmt: skip
    parser.add_argument("--path", action="append", default=[], metavar="FILE", help="checkpoint, repeatable")
    parser.add_argument("--tokens", type=at_least_one, default=3000, metavar="N", help="target tokens (default: 3000)")
    parser.add_argument("--split", default="train", help="split of the data (default: train)")
    parser.add_argument("--seeds", type=at_least_one, default=1, metavar="N", help="mean over seeds 1-N (default: 1)")
    parser.add_argument("--eval-mode", action="store_true", help="disable dropout")
    parser.add_argument("--per-layer", action="store_true", help="print ratios per layer instead of means")
    parser.add_argument("--json", metavar="FILE", help="write all results, per seed, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the gradient norms: .png, .svg or .pdf")
    # unknown flags are fairseq's: see `cli.parse`
    parser.set_defaults(fairseq_flags=[])
    note = "All other flags are passed to fairseq-train for --arch (--deep-init ds, --encoder-layers 12, ...)."
    parser.epilog = f"{note}\n\n{parser.epilog or ''}"


def run(args: argparse.Namespace) -> int:
    """Measure each model; print, write and draw the results."""
    _check(args)
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # fairseq logs each dictionary and data set that it loads
    subjects = [fresh(name, args.data, args.fairseq_flags) for name in args.arch]
    subjects += [trained(path, args.data, "--cpu" in args.fairseq_flags) for path in args.path]
    results = [measure(subject, args.split, args.tokens, args.seeds, not args.eval_mode) for subject in subjects]
    batch = results[0]["batch"]
    print(
        f"{batch['sentences']} sentences of {args.split}, {batch['target_tokens']:,} target tokens; "
        f"{'eval' if args.eval_mode else 'train'} mode; {args.seeds} seed{'s' if args.seeds > 1 else ''}"
    )
    for result in results:
        print(f"\n{_report(result, args.per_layer)}")
    if len(results) > 1:
        print(f"\n{_comparison(results)}")
    if args.json is not None:
        write_text(args.json, _record(args, results))
    if args.plot is not None:
        pictures.save_figure(_draw(results), args.plot)
    written = [path for path in (args.json, args.plot) if path is not None]
    if written:
        print("\n->", ", ".join(written))
    return 0


def _check(args: argparse.Namespace) -> None:
    check_fairseq()
    if not args.arch and not args.path:
        raise UsageError("nothing to measure: give --arch NAME or --path CHECKPOINT")
    extra = [flag for flag in args.fairseq_flags if flag != "--cpu"]
    if extra and not args.arch:
        raise UsageError(f"{extra[0]} is not supported with --path, since a checkpoint has its own flags: omit it")
    if not os.path.isdir(args.data):
        cure = "give a directory written by fairseq-preprocess, before fairseq's flags"
        raise UsageError(f"{args.data}: no such directory; {cure}")
    words = [*args.fairseq_flags, *(word for arch in args.arch for word in arch.split())]
    files = [word.partition("=")[2] or word for word in words]  # such as the value of --encoder-embed-path
    check_outputs([args.json, args.plot], [args.data, *args.path, *files])
    if args.plot is not None:
        pictures.check_picture(args.plot)


def _report(result: dict[str, Any], per_layer: bool) -> str:
    mean = result["mean"]
    norms = mean["gradient_norm"]
    columns = [["layer", "embedding", *range(1, 1 + max(len(norms[side]) for side in SIDES))]]
    for side in SIDES:
        start = _number(norms["embedding"]) if side == "encoder" else ""
        columns.append([f"{side} gradient", start, *map(_number, norms[side])])
        columns += [[name, *map(_number, mean[f"stream_{name}"][side])] for name in ("std", "between")]
    rows = [[str(cell) for cell in row] for row in zip_longest(*columns, fillvalue="")][: len(columns[0])]
    ends = {"aggregator": [norms.get(f"{side}_aggregator") for side in SIDES],
            "last/first": [_spread(norms[side]) for side in SIDES]}  # fmt: skip
    rows += [[name, _number(encoder), "", "", _number(decoder), "", ""]
             for name, (encoder, decoder) in ends.items() if name == "last/first" or encoder or decoder]  # fmt: skip
    head = f"{result['name']}: {result['parameters']:,} parameters, loss {mean['loss']:.3f}"
    if mean["source_gain"] is not None:
        head += f", source gain {mean['source_gain']:.3f}"
    text = f"{head}\n{format_table(rows, right=range(1, 7), indent='  ')}"
    if mean["sublayers"] is None:
        return f"{text}\n  no residual connections, so no Var(r) and beta"
    missing = [f"\n  the {side} has no residual connections" for side in SIDES if not mean["sublayers"][side]]
    return f"{text}\n\n{_ratio_table(mean['sublayers'], per_layer)}{''.join(missing)}"


def _ratio_table(sublayers: dict[str, Any], per_layer: bool) -> str:
    """Return the ratios of each sub-layer, and their means over layers by kind of sub-layer, as in Table 1."""
    rows, means = [("sub-layer", "layer", "Var(r)", "beta_LN", "beta_RC", "beta")], {}
    for side in SIDES:
        for entry in sublayers[side]:
            name, ratios = f"{side} {entry['part']}", [entry[ratio] for ratio in RATIOS]
            means.setdefault(name, []).append(ratios)
            rows += [(name, str(entry["layer"]), *map(_number, ratios))] * per_layer
    rows += [(name, "mean", *map(_number, mean_of(ratios))) for name, ratios in means.items()]
    return format_table(rows, right=range(1, 6), indent="  ")


def _comparison(results: list[dict[str, Any]]) -> str:
    rows = [("gradient norm", "encoder first", "last", "last/first", "decoder first", "last", "last/first")]
    for result in results:
        sides = [result["mean"]["gradient_norm"][side] for side in SIDES]
        cells = [[*map(_number, (norms[0], norms[-1], _spread(norms)))] if norms else ["", "", "-"] for norms in sides]
        rows.append((result["name"], *cells[0], *cells[1]))
    return format_table(rows, right=range(1, 7))


def _spread(norms: list[float]) -> float | None:
    return norms[-1] / norms[0] if norms and norms[0] else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if 0.1 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


def _record(args: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Return all results as JSON, which has null instead of NaN and infinity."""
    import fairseq

    packages = {"fairseq_deep": fairseq_deep, "fairseq": fairseq, "torch": torch}
    versions = {name: package.__version__ for name, package in packages.items()}
    record = {
        "command": ["fairseq-deep", *sys.argv[1:]],
        "versions": {**versions, "python": platform.python_version()},
        "options": {name: value for name, value in vars(args).items() if name not in ("command", "run")},
        "models": results,
    }
    finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1) + "\n"


def _draw(results: list[dict[str, Any]]) -> Any:
    """Draw the gradient norm by layer, with a panel per stack (Fig. 1)."""
    runs = {
        result["name"]: {side: dict(enumerate(result["mean"]["gradient_norm"][side], 1)) for side in SIDES}
        for result in results
    }
    return pictures.draw_runs(runs, {f"{side} gradient norm": (None, side) for side in SIDES}, "layer")
