"""draw the aggregation weights of a checkpoint (weights), or the curves of training runs (run)

The picture of weights is Fig. 5 of Wang et al., 2019: the weight matrices of (a) encoder and (b) decoder, without
points with |w| < 0.1 or with |w| below 5 % of the maximum in their row, and (c) the weights of one layer's output.
Several runs are drawn in one picture; a resumed run is drawn as one line.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools import pictures, training_logs
from fairseq_deep.tools.checkpoints import load_checkpoint, model_flags
from fairseq_deep.tools.output_files import check_outputs, write_csv, write_text
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep plot weights checkpoints/checkpoint_best.pt --output weights.svg"
WEIGHTS = "draw the learned weight matrices of DLCL"
RUNS = "draw the loss, perplexity, learning rate and gradient norm of training runs, by updates"
BANDS = ("newest", "previous", "older", "embedding")
RULE = "points with |w| < 0.1 or below 5 % of their row's maximum are omitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each kind of picture."""
    kinds = parser.add_subparsers(dest="what", metavar="{weights,run}", required=True)
    kind = kinds.add_parser("weights", help=WEIGHTS, description=WEIGHTS, allow_abbrev=False)
    kind.set_defaults(draw=draw_weights)
    kind.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint with --layer-agg dlcl")
    kind.add_argument("--output", metavar="FILE",
                      help="picture to write: .png, .svg or .pdf (default: NAME.weights.png)")  # fmt: skip
    kind.add_argument("--column", type=int, metavar="K", help="layer output y_K of (c) (default: depth / 3)")
    kind.add_argument("--json", metavar="FILE", help="write the matrices as JSON")
    kind.add_argument("--csv", metavar="FILE", help="write the matrices as CSV: stack, row, column, weight, shown")
    kind = kinds.add_parser("run", help=RUNS, description=RUNS, allow_abbrev=False)
    kind.set_defaults(draw=draw_runs)
    kind.add_argument("logs", metavar="LOG", nargs="+", help="log of fairseq-train, or directory of a recipe")
    kind.add_argument("--names", metavar="A,B", help="names of the logs (default: their paths)")
    kind.add_argument("--output", metavar="FILE",
                      help="picture to write: .png, .svg or .pdf (default: run.png)")  # fmt: skip
    kind.add_argument("--csv", metavar="FILE", help="write the numbers as CSV: run, measure, update, value")


def run(args: argparse.Namespace) -> int:
    """Draw the picture."""
    return args.draw(args)


def draw_weights(args: argparse.Namespace) -> int:
    """Print a summary, write the numbers and draw the picture."""
    output, default = args.output, os.path.splitext(os.path.basename(args.checkpoint))[0] + ".weights.png"
    if output is not None or args.json is None and args.csv is None:
        output = pictures.check_picture(output, default)
    elif args.column is not None:
        raise UsageError("--column chooses a panel of the picture, which --json and --csv omit: add --output FILE")
    check_outputs([output, args.json, args.csv], [args.checkpoint])
    matrices = load_weights(args.checkpoint)
    column, records = _column(args.column, matrices), {side: _record(matrix) for side, matrix in matrices.items()}
    print(format_table(_weights_table(matrices), right=range(1, 9)))
    print(f"means of |w|: newest y_l, previous y_(l-1), older and embedding y_0 in the sum x_(l+1); {RULE}")
    if args.json is not None:
        write_text(args.json, json.dumps(records) + "\n")
    if args.csv is not None:
        write_csv(args.csv, ("stack", "row", "column", "weight", "shown"), _weight_rows(records))
    if output is not None:
        figure = pictures.draw_weights(matrices, column)
        figure.suptitle(printable(os.path.join(*os.path.abspath(args.checkpoint).split(os.sep)[-3:])), fontsize=9)
        pictures.save_figure(figure, output)
    print("->", ", ".join(filter(None, (args.json, args.csv, output))))
    return 0


def load_weights(path: str) -> dict[str, Any]:
    """Return the `WeightMatrix` of each stack of the checkpoint at `path` that has one.

    Raises:
        UsageError: the file is not a checkpoint, or has no DLCL weights
    """
    state = load_checkpoint(path)

    from fairseq_deep.core.diagnostics.weights import dlcl_weights

    flags = model_flags(state)
    # like models/legacy.py: the original code's window masks only normalised weights
    normalize = bool(flags.get("dlcl_normalize") or flags.get("normalize_learned_weight"))
    window = flags.get("dlcl_window") or (flags.get("history_window_size") if normalize else None)
    matrices = dlcl_weights(state["model"], normalize, window if window and window > 0 else None)
    if not matrices:
        raise UsageError(f"{path} has no DLCL weights: give a checkpoint that was trained with --layer-agg dlcl")
    for side, matrix in matrices.items():
        if not matrix.values.isfinite().all():
            raise UsageError(f"{path} holds NaN or Inf in {side}.history.weight; give an earlier checkpoint")
    return matrices


def _column(asked: int | None, matrices: dict[str, Any]) -> int:
    side, matrix = next(iter(matrices.items()))
    depth = len(matrix.values) - 1
    if asked is not None and not 0 <= asked <= depth:
        raise UsageError(f"--column {asked} must be from 0 to {depth} for the {side}")
    return depth // 3 if asked is None else asked


def _weights_table(matrices: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("stack", "matrix", "per entry", "shown", *BANDS, "largest")]
    for side, matrix in matrices.items():
        size, bands = len(matrix.values), matrix.bands()
        means = [f"{bands[name]:.3f}" if name in bands else "-" for name in BANDS]
        shown = f"{int(matrix.significant().sum())} of {size * (size + 1) // 2}"
        rows.append((side, f"{size}x{size}", str(matrix.per_entry), shown, *means, f"{matrix.values.abs().max():.3f}"))
    return rows


def _record(matrix: Any) -> dict[str, Any]:
    """Return the lower triangle: its weights, and whether each is shown."""
    rows = {"weights": matrix.values.tolist(), "shown": matrix.significant().tolist()}
    cut = {name: [row[: index + 1] for index, row in enumerate(lines)] for name, lines in rows.items()}
    return {"weights_per_entry": matrix.per_entry, **cut}


def _weight_rows(records: dict[str, dict[str, Any]]) -> Iterator[Sequence[Any]]:
    for side, record in records.items():
        for row, cells in enumerate(map(zip, record["weights"], record["shown"])):
            yield from ((side, row, column, weight, int(shown)) for column, (weight, shown) in enumerate(cells))


def draw_runs(args: argparse.Namespace) -> int:
    """Print a table, draw the picture and write the numbers."""
    names = args.names.split(",") if args.names else _short(args.logs)
    if len(names) != len(args.logs):
        raise UsageError(f"--names has {len(names)} names for {len(args.logs)} logs: give one per log")
    if len({*names}) < len(names):
        raise UsageError("two logs have the same name: give --names A,B,...")
    paths = [_find(place) for place in args.logs]
    output = pictures.check_picture(args.output, "run.png")
    check_outputs([output, args.csv], [*args.logs, *paths])
    runs = {name: training_logs.read_run(path) for name, path in zip(names, paths)}
    print(format_table(_runs_table(runs), right=range(1, 9)))
    if args.csv is not None:
        write_csv(args.csv, ("run", "measure", "update", "value"), _run_rows(runs))
    pictures.save_figure(pictures.draw_runs(runs), output)
    print("->", ", ".join(filter(None, (args.csv, output))))
    return 0


def _find(place: str) -> str:
    if not os.path.isdir(place):
        return place
    found = training_logs.find_log(place)
    if not found:
        names = " nor ".join(training_logs.PLACES)
        raise UsageError(f"{place} has neither {names}: give the directory of a recipe that has trained")
    return found


def _short(paths: Sequence[str]) -> list[str]:
    """Return the paths without their common directories."""
    whole = [os.path.abspath(path) for path in paths]
    if len(whole) == 1:
        return [os.path.basename(whole[0])]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole])
    return [os.path.relpath(path, shared) for path in whole]


def _runs_table(runs: dict[str, training_logs.Run]) -> list[tuple[str, ...]]:
    """Return the last loss, and the last and best validation values, of each run."""
    measures = {"valid loss": ("valid_loss", min), "valid ppl": ("valid_ppl", min), "valid BLEU": ("valid_bleu", max)}
    if not any("valid_bleu" in curves for curves in runs.values()):
        del measures["valid BLEU"]
    rows = [("run", "updates", "loss", *(title for name in measures for title in (name, "best")))]
    for name, curves in runs.items():
        values = {measure: list(curve.values()) for measure, curve in curves.items()}
        cells = [_figure(values["loss"][-1]) if "loss" in values else "-"]
        for measure, best in measures.values():
            cells += map(_figure, (values[measure][-1], best(values[measure]))) if measure in values else "--"
        rows.append((name, f"{max(map(max, curves.values())):,}", *cells))
    return rows


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e9 else f"{value:.3g}"


def _run_rows(runs: dict[str, training_logs.Run]) -> Iterator[Sequence[Any]]:
    for name, curves in runs.items():
        for measure in (part for parts in training_logs.MEASURES.values() for part in parts if part):
            yield from ((name, measure, update, value) for update, value in curves.get(measure, {}).items())
