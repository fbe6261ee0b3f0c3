"""All pictures of the tools; matplotlib is imported on first use."""

import io
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.text import packages_named
from fairseq_deep.tools.output_files import replacing
from fairseq_deep.tools.training_logs import MEASURES, Curve, Run

FORMATS = ("png", "svg", "pdf")
# distinguishable with colour blindness (Okabe and Ito), most different first
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

Parts = tuple[str | None, str | None]
LOG_SCALES = ("perplexity", "gradient norm")
LARGEST_DRAWN = 1e100  # matplotlib fails near the largest double


def check_picture(path: str | None, default: str = "") -> str:
    """Return `path`, or `default` if it is None; called before computations.

    Raises:
        UsageError: the format is not supported, `default` is used and exists, or matplotlib is missing
    """
    if path is None:
        path = default
        if os.path.lexists(path):  # it may show another run
            raise UsageError(f"{path}: exists; add --output {path} to replace it, or choose another --output")
    if _format(path) not in FORMATS:
        raise UsageError(f"cannot draw {path}: the file name must end in {', '.join(f'.{name}' for name in FORMATS)}")
    check_library()
    return path


def check_library() -> None:
    """Raise `UsageError` if matplotlib is missing."""
    with packages_named():
        import matplotlib.figure  # noqa: F401


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of `width` x `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str) -> None:
    """Write `figure` to `path` atomically; the output is deterministic."""
    with replacing(path) as temporary:
        _draw(figure, temporary, _format(path))


def as_svg(figure: Any) -> str:
    """Return `figure` as an HTML element."""
    text = io.StringIO()
    _draw(figure, text, "svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(figure: Any, target: Any, kind: str) -> None:
    import matplotlib

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fairseq_deep"}):
        figure.savefig(target, format=kind, dpi=150, metadata=dates.get(kind))


def _format(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()


def draw_runs(runs: dict[str, Run], measures: Mapping[str, Parts] = MEASURES, x: str = "updates") -> Any:
    """Draw a panel per measure of *runs*: thin lines for training, thick lines with points for validation.

    Args:
        measures: names of both in the runs, by the name of the panel
        x: name of the horizontal axis
    """
    known = {part for run in runs.values() for part in run}
    shown = {name: parts for name, parts in measures.items() if known & {*parts}}
    rows, columns = (len(shown) + 1) // 2, min(2, len(shown))
    figure = new_figure(4.6 * columns + 0.4, 3.1 * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.remove()
    handles = []
    for axes, (name, parts) in zip(panels, shown.items()):
        handles = [_draw_curves(axes, curves, parts, index) for index, curves in enumerate(runs.values())]
        values = (value for run in runs.values() for part in parts for value in run.get(part or "", {}).values())
        has_positive = any(value > 0 for value in _drawable(values))  # which a log scale needs
        if name.endswith(LOG_SCALES) and has_positive:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel=x, ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="#dddddd", linewidth=0.6)
    note = "thin: training, thick: validation" if {"valid_loss", "valid_ppl"} & known else None
    figure.legend(handles, list(runs), loc="outside upper center", ncols=min(4, len(runs)), fontsize=8, frameon=False,
                  title=note, title_fontsize=8)  # fmt: skip
    return figure


def _drawable(values: Iterable[float]) -> list[float]:
    return [value if abs(value) <= LARGEST_DRAWN else math.nan for value in values]


def _draw_curves(axes: Any, curves: Run, parts: Parts, index: int) -> Any:
    """Draw the curves of one run, and return the last line."""
    turn, colour = divmod(index, len(COLOURS))
    look = {"color": COLOURS[colour], "linestyle": ("-", "--", ":", "-.")[turn % 4]}

    def draw(curve: Curve, **style: Any) -> Any:
        return axes.plot(list(curve), _drawable(curve.values()), **look, **style)[0]

    training, validation = (curves.get(part or "", {}) for part in parts)
    width, alpha = (0.9, 0.55) if parts[1] else (1.3, 0.9)
    line = draw(training, linewidth=width, alpha=alpha) if training else draw({}, linewidth=1.8)
    if validation:
        points = {"marker": "o", "markersize": 3} if len(validation) < 40 else {}
        line = draw(validation, linewidth=1.8, **points)
    return line


def draw_weights(matrices: dict[str, Any], column: int) -> Any:
    """Draw the `WeightMatrix` of each stack, and the weights of one layer output of the first."""
    figure = new_figure(4.6 * len(matrices) + 4.2, 3.9)
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
    axes.plot(positions, values, color=COLOURS[0], marker="o", markersize=3.5, linewidth=1.2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("sum $x_{l+1}$")
    axes.set_ylabel("weight")
