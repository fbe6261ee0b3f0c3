"""draw the learned weight matrices of DLCL

The picture is Fig. 5 of Wang et al., 2019: the weight matrices of (a) encoder and (b) decoder, without points with
|w| < 0.1 or with |w| below 5 % of the maximum in their row, and (c) the weights of one layer's output.
"""

import argparse
import json
import os
from typing import Any

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools import figures
from fairseq_deep.tools.checkpoints import load_checkpoint, model_flags
from fairseq_deep.tools.output_files import check_outputs, write_text
from fairseq_deep.tools.tables import format_table

BANDS = ("newest", "previous", "older", "embedding")
RULE = "points with |w| < 0.1 or below 5 % of their row's maximum are omitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the outputs."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint with --layer-agg dlcl")
    parser.add_argument("--output", metavar="FILE",
                        help="picture to write: .png, .svg or .pdf (default: NAME.weights.png)")  # fmt: skip
    parser.add_argument("--column", type=int, metavar="K", help="layer output y_K of (c) (default: depth / 3)")
    parser.add_argument("--json", metavar="FILE", help="write the matrices as JSON")
    parser.add_argument("--csv", metavar="FILE", help="write the matrices as CSV: stack, row, column, weight, shown")


def run(args: argparse.Namespace) -> int:
    """Print a summary, write the numbers and draw the picture."""
    output, default = args.output, os.path.splitext(os.path.basename(args.checkpoint))[0] + ".weights.png"
    if output is not None or args.json is None and args.csv is None:
        output = figures.check_picture(output, default)
    check_outputs([output, args.json, args.csv], [args.checkpoint])
    matrices = load_weights(args.checkpoint)
    column = _column(args.column, matrices)
    print(format_table(_summary(matrices), right=range(1, 9)))
    print(f"means of |w|: newest y_l, previous y_(l-1), older and embedding y_0 in the sum x_(l+1); {RULE}")
    if args.json is not None:
        write_text(args.json, json.dumps({side: _record(matrix) for side, matrix in matrices.items()}) + "\n")
    if args.csv is not None:
        write_text(args.csv, _csv(matrices))
    if output is not None:
        figure = _draw(matrices, column)
        figure.suptitle(printable(os.path.join(*os.path.abspath(args.checkpoint).split(os.sep)[-3:])), fontsize=9)
        figures.save_figure(figure, output)
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


def _summary(matrices: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("stack", "matrix", "per entry", "shown", *BANDS, "largest")]
    for side, matrix in matrices.items():
        size = len(matrix.values)
        bands = matrix.bands()
        means = [f"{bands[name]:.3f}" if name in bands else "-" for name in BANDS]
        shown = f"{int(matrix.significant().sum())} of {size * (size + 1) // 2}"
        rows.append((side, f"{size}x{size}", str(matrix.per_entry), shown, *means, f"{matrix.values.abs().max():.3f}"))
    return rows


def _record(matrix: Any) -> dict[str, Any]:
    return {
        "weights_per_entry": matrix.per_entry,
        "weights": [row[: index + 1] for index, row in enumerate(matrix.values.tolist())],
        "shown": [row[: index + 1] for index, row in enumerate(matrix.significant().tolist())],
    }


def _csv(matrices: dict[str, Any]) -> str:
    lines = ["stack,row,column,weight,shown"]
    for side, matrix in matrices.items():
        shown = matrix.significant().tolist()
        for row, weights in enumerate(matrix.values.tolist()):
            lines += [f"{side},{row},{k},{weights[k]!r},{int(shown[row][k])}" for k in range(row + 1)]
    return "\n".join(lines) + "\n"


def _draw(matrices: dict[str, Any], column: int) -> Any:
    figure = figures.new_figure(4.6 * len(matrices) + 4.2, 3.9)
    panels = figure.subplots(1, len(matrices) + 1, width_ratios=[1.15] * len(matrices) + [1])
    letters = iter("abc")
    for axes, (side, matrix) in zip(panels, matrices.items()):
        _draw_matrix(figure, axes, matrix)
        axes.set_title(f"({next(letters)}) {len(matrix.values) - 1}-layer {side}{_mean_note(matrix)}", fontsize=10)
    side, matrix = next(iter(matrices.items()))
    _draw_column(panels[-1], matrix, column)
    title = f"({next(letters)}) weights of $y_{{{column}}}$ in the {side}{_mean_note(matrix)}"
    panels[-1].set_title(title, fontsize=10)
    return figure


def _mean_note(matrix: Any) -> str:
    return f"\nmean over the {matrix.per_entry} weights of an entry" if matrix.per_entry > 1 else ""


def _draw_matrix(figure: Any, axes: Any, matrix: Any) -> None:
    import numpy
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # without the pale middle: values near zero are not shown, and the smallest shown values must be visible
    strong = colormaps["RdBu_r"](numpy.r_[0:0.35:128j, 0.65:1:128j])
    values = matrix.values.numpy()
    shown = matrix.significant().numpy()
    size = len(values)
    extent = (-0.5, size - 0.5, size + 0.5, 0.5)  # columns y_0 ... y_L, rows x_1 ... x_(L+1)
    lower = numpy.tril(numpy.ones_like(shown))
    grey = numpy.ma.masked_where(~lower | shown, numpy.zeros_like(values))
    axes.imshow(grey, cmap=ListedColormap(["#eeeeee"]), extent=extent, interpolation="none")
    limit = float(abs(values).max()) or 1.0
    image = axes.imshow(
        numpy.ma.masked_where(~shown, values),
        cmap=ListedColormap(strong),
        vmin=-limit,
        vmax=limit,
        extent=extent,
        interpolation="none",
    )
    figure.colorbar(image, ax=axes, shrink=0.85)
    step = max(1, round((size - 1) / 6))
    axes.set_xticks(range(0, size, step))
    axes.set_yticks(range(1, size + 1, step))
    axes.set_xlabel("layer output $y_k$")
    axes.set_ylabel("sum $x_{l+1}$")


def _draw_column(axes: Any, matrix: Any, column: int) -> None:
    values = matrix.values[column:, column].tolist()
    positions = range(column + 1, column + 1 + len(values))
    axes.axhline(0.0, color="#999999", linewidth=0.8)
    axes.plot(positions, values, color=figures.COLOURS[0], marker="o", markersize=3.5, linewidth=1.2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("sum $x_{l+1}$")
    axes.set_ylabel("weight")
