"""draw the loss, perplexity, learning rate and gradient norm of training runs, by updates

A log is the output of fairseq-train (with ``--log-format json`` or ``simple``), the ``train.jsonl`` of a recipe, or its
directory. Several logs are drawn in one picture; a resumed run is drawn as one line.
"""

import argparse
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import LOGGED, check, numeral, parse
from fairseq_deep.tools import figures
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_outputs, write_text
from fairseq_deep.tools.tables import format_table

# panel: names in the log, in training (after each interval) and in validation
MEASURES = {
    "loss": ("loss", "valid_loss"),
    "perplexity": ("ppl", "valid_ppl"),
    "BLEU": (None, "valid_bleu"),
    "learning rate": ("lr", None),
    "gradient norm": ("gnorm", None),
}
LOG_SCALES = ("perplexity", "gradient norm")
PLACES = ("train.jsonl", "logs/4-train.log")  # in the directory of a recipe
LARGEST_DRAWN = 1e100  # matplotlib fails near the largest double
ENTRY = re.compile(r"(?:^|\| )(train_inner|valid) \| (.*)$")
SIMPLE = re.compile(r"([a-z]\w*)[= ](-?[\d.]+(?:e[-+]?\d+)?|nan|-?inf)(?=[\s,]|$)")

Curve = dict[int, float]
Run = dict[str, Curve]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the logs and the outputs."""
    parser.add_argument("logs", metavar="LOG", nargs="+", help="log of fairseq-train, or directory of a recipe")
    parser.add_argument("--names", metavar="A,B", help="names of the logs (default: their paths)")
    parser.add_argument("--output", metavar="FILE",
                        help="picture to write: .png, .svg or .pdf (default: run.png)")  # fmt: skip
    parser.add_argument("--csv", metavar="FILE", help="write the numbers as CSV: run, measure, update, value")


def run(args: argparse.Namespace) -> int:
    """Print a table, draw the picture and write the numbers."""
    names = args.names.split(",") if args.names else _short(args.logs)
    if len(names) != len(args.logs):
        raise UsageError(f"--names has {len(names)} names for {len(args.logs)} logs: give one per log")
    if len({*names}) < len(names):
        raise UsageError("two logs have the same name: give --names A,B,...")
    paths = [_find(place) for place in args.logs]
    output = figures.check_picture(args.output, "run.png")
    check_outputs([output, args.csv], [*args.logs, *paths])
    runs = {name: read_run(path) for name, path in zip(names, paths)}
    print(format_table(_summary(runs), right=range(1, 9)))
    if args.csv is not None:
        write_text(args.csv, _csv(runs))
    figures.save_figure(draw(runs), output)
    print("->", ", ".join(filter(None, (args.csv, output))))
    return 0


def _find(place: str) -> str:
    if not os.path.isdir(place):
        return place
    found = find_log(place)
    if not found:
        raise UsageError(f"{place} has neither {' nor '.join(PLACES)}: give the directory of a recipe that has trained")
    return found


def find_log(folder: str) -> str | None:
    """Return the training log in the directory of a recipe; None if it does not exist or is empty."""
    paths = (os.path.join(folder, name) for name in PLACES)
    return next((path for path in paths if os.path.isfile(path) and os.path.getsize(path)), None)


def _short(paths: Sequence[str]) -> list[str]:
    """Return the paths without their common directories."""
    whole = [os.path.abspath(path) for path in paths]
    if len(whole) == 1:
        return [os.path.basename(whole[0])]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole])
    return [os.path.relpath(path, shared) for path in whole]


def read_run(path: str, started: bool = False) -> Run:
    """Read the curves of the log at *path*, by their names in the log.

    If an update was repeated, as after a kill, the later entry counts.

    Args:
        started: accept a log that has no entries of training yet

    Raises:
        UsageError: the log cannot be read, or has no entries of training without *started*
    """
    curves: Run = {}
    for place, line in enumerate(read_lines(path), 1):
        entry = _entry(line)
        try:
            check(entry, LOGGED)
        except ValueError as error:
            raise UsageError(f"{path}:{place}: {error}; remove the line") from error
        update = entry.get("num_updates", entry.get("valid_num_updates"))
        for name, value in entry.items() if update is not None else ():
            if numeral(value):
                curves.setdefault(name, {})[int(float(update))] = float(value)
    if not started and not any(name in curves for names in MEASURES.values() for name in names):
        raise UsageError(f"{path} is not a training log: it must have a line with train_inner or valid")
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _entry(line: str) -> dict[str, Any]:
    """Return the measures in a line of a log; empty if there are none."""
    found = ENTRY.search(line)
    text = found[2] if found else line
    if text.startswith("{"):
        try:
            entry = parse(text)
        except ValueError:
            return {}
        return entry if found or entry.get("kind") in ("train_inner", "valid") else {}
    prefix = "valid_" if found and found[1] == "valid" else ""
    return {prefix + name: value for name, value in SIMPLE.findall(text)} if found else {}


def _summary(runs: dict[str, Run]) -> list[tuple[str, ...]]:
    measures = [("valid loss", "valid_loss", min), ("valid ppl", "valid_ppl", min)]
    if any("valid_bleu" in curves for curves in runs.values()):
        measures.append(("valid BLEU", "valid_bleu", max))
    rows = [("run", "updates", "loss", *(title for name, *_ in measures for title in (name, "best")))]
    for name, curves in runs.items():
        updates = max(max(curve) for curve in curves.values())
        cells = []
        for _, measure, best in measures:
            values = list(curves.get(measure, {}).values())
            cells += [_figure(values[-1]), _figure(best(values))] if values else ["-", "-"]
        loss = list(curves.get("loss", {}).values())
        rows.append((name, f"{updates:,}", _figure(loss[-1]) if loss else "-", *cells))
    return rows


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e9 else f"{value:.3g}"


def _csv(runs: dict[str, Run]) -> str:
    lines = ["run,measure,update,value"]
    for name, curves in runs.items():
        label = '"' + name.replace('"', '""') + '"' if set(name) & set(',"') else name
        for measure in (part for parts in MEASURES.values() for part in parts if part):
            lines += [f"{label},{measure},{update},{value!r}" for update, value in curves.get(measure, {}).items()]
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, Run]) -> Any:
    """Draw a panel per measure of *runs*: thin lines for training, thick lines with points for validation."""
    known = {part for run in runs.values() for part in run}
    shown = {name: parts for name, parts in MEASURES.items() if known & {*parts}}
    rows, columns = (len(shown) + 1) // 2, min(2, len(shown))
    figure = figures.new_figure(4.6 * columns + 0.4, 3.1 * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, (name, parts) in zip(panels, shown.items()):
        for index, curves in enumerate(runs.values()):
            _draw_curves(axes, curves, parts, index)
        values = (value for run in runs.values() for part in parts if part for value in run.get(part, {}).values())
        if name in LOG_SCALES and any(value > 0 for value in _drawable(values)):  # a log scale needs a positive value
            _scale_log(axes)
        axes.set(xlabel="updates", ylabel=name)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = _legend(runs)
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    return figure


def _drawable(values: Iterable[float]) -> list[float]:
    return [value if abs(value) <= LARGEST_DRAWN else math.nan for value in values]


def _scale_log(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _look(index: int) -> dict[str, Any]:
    turn, colour = divmod(index, len(figures.COLOURS))
    return {"color": figures.COLOURS[colour], "linestyle": ("-", "--", ":", "-.")[turn % 4]}


def _draw_curves(axes: Any, curves: Run, parts: Sequence[str | None], index: int) -> None:
    training, validation = (curves.get(part or "", {}) for part in parts)
    if training:
        width, alpha = (0.9, 0.55) if parts[1] else (1.3, 0.9)
        axes.plot(list(training), _drawable(training.values()), linewidth=width, alpha=alpha, **_look(index))
    if validation:
        points = {"marker": "o", "markersize": 3} if len(validation) < 40 else {}
        axes.plot(list(validation), _drawable(validation.values()), linewidth=1.8, **points, **_look(index))


def _legend(runs: dict[str, Run]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=1.8, **_look(index)) for index in range(len(runs))]
    grey = [Line2D([], [], color="#777777", linewidth=0.9), Line2D([], [], color="#777777", linewidth=1.8, marker="o")]
    both = any(part in run for run in runs.values() for part in ("valid_loss", "valid_ppl"))
    return (handles + grey, [*runs, "training", "validation"]) if both else (handles, list(runs))
