"""Pictures of a comparison: validation loss during training, the systems by BLEU, and BLEU by depth."""

from __future__ import annotations

from typing import Any

import numpy

from fairseq_deep.tools import pictures

STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osv^DXP"
Row = dict[str, Any]


def draw(rows: list[Row], path: str) -> None:
    """Draw the systems that have results: curves of the loss, and a ranking with minimum and maximum over seeds."""
    shown = [(index, row) for index, row in enumerate(rows) if row["done"]]
    figure = pictures.new_figure(13, max(4.6, 1.2 + 0.26 * len(shown)))
    left, right = figure.subplots(1, 2)
    _draw_curves(left, shown)
    left.set(xlabel="updates", ylabel="validation loss", title="Validation loss while training")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    _rank(right, shown)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    seeds = max(len(row["done"]) for _, row in shown)
    figure.suptitle(f"{seeds} seeds: mean and range" if seeds > 1 else "1 seed", fontsize=9)
    pictures.save_figure(figure, path)


def _measure(rows: list[Row]) -> tuple[str, str]:
    """Return the figure to show, and its name: BLEU, or the loss if nothing was translated."""
    return ("bleu", "BLEU") if any(row["bleu"] for row in rows) else ("valid_loss", "validation loss")


def _look(index: int) -> dict[str, Any]:
    """Return the style of a system: the first is black; repeated colours have new line styles and markers."""
    colours = [pictures.COLOURS[-1], *pictures.COLOURS[:-1]]
    turn, place = divmod(index, len(colours))
    style = {"color": colours[place], "linestyle": STYLES[turn % len(STYLES)]}
    return {**style, "marker": MARKERS[(turn + place) % len(MARKERS)]}


def _draw_curves(axes: Any, shown: list[tuple[int, Row]]) -> None:
    """Draw the mean loss at each update that all seeds have, and its range over seeds.

    The axis ends at twice the largest first loss, so a diverged run does not flatten the other curves.
    """
    means = []
    for index, row in shown:
        look, curves = _look(index), [row["curve"][seed] for seed in row["done"]]
        updates = sorted(set.intersection(*map(set, curves)))
        losses = numpy.array([[curve[update] for update in updates] for curve in curves])
        means.append(losses.mean(0))
        axes.plot(updates, means[-1], linewidth=1.4, **{**look, "marker": ""}, label=row["system"])
        if len(curves) > 1:
            axes.fill_between(updates, losses.min(0), losses.max(0), color=look["color"], alpha=0.15, linewidth=0)
    means = [mean[numpy.isfinite(mean)] for mean in means]
    known, top = numpy.concatenate(means), 2 * max((mean[0] for mean in means if len(mean)), default=numpy.inf)
    if max(known, default=0) > top:
        axes.set_ylim(min(known) - 0.05 * (top - min(known)), top)


def _errors(rows: list[Row], measure: str) -> list[list[float]]:
    """Return the distances from the means to the minimum and the maximum over seeds."""
    found = [row[measure] for row in rows]
    return [[each["mean"] - each["min"] for each in found], [each["max"] - each["mean"] for each in found]]


def _rank(axes: Any, shown: list[tuple[int, Row]]) -> None:
    """Draw one line per system, best on top, with its number of parameters."""
    measure, name = _measure([row for _, row in shown])
    sign = 1 if measure == "bleu" else -1
    ranked = sorted((entry for entry in shown if entry[1][measure]), key=lambda entry: sign * entry[1][measure]["mean"])
    for place, (index, row) in enumerate(ranked):
        axes.errorbar(row[measure]["mean"], place, xerr=_errors([row], measure), capsize=2.5, linewidth=1.2,
                      markersize=6, **{**_look(index), "linestyle": "none"})  # fmt: skip
    labels = [f"{row['system']}  {row['parameters'] / 1e6:.2f}M" for _, row in ranked]
    axes.set_yticks(range(len(ranked)), labels, fontsize=8)
    axes.set(xlabel=name, title=f"{name[0].upper()}{name[1:]} (parameters)", ylim=(-0.7, len(ranked) - 0.3))


def draw_depths(rows: list[Row], path: str) -> None:
    """Draw BLEU (or loss) by depth, as in Fig. 3 of Wang et al., 2019: a curve per ``line`` of *rows*."""
    measure, name = _measure(rows)
    figure = pictures.new_figure(5.4, 3.6)
    axes = figure.subplots()
    for index, line in enumerate(dict.fromkeys(row["line"] for row in rows)):
        own = sorted((row for row in rows if row["line"] == line and row[measure]), key=lambda row: row["depth"])
        means = [row[measure]["mean"] for row in own]
        axes.errorbar([row["depth"] for row in own], means, yerr=_errors(own, measure), capsize=3, linewidth=1.4,
                      markersize=5, label=line, **_look(index))  # fmt: skip
    axes.set(ylabel=name, xlabel="encoder layers", xticks=sorted({row["depth"] for row in rows}))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    pictures.save_figure(figure, path)
