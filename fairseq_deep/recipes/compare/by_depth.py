"""BLEU (or loss) by depth, as in Fig. 3 of Wang et al., 2019."""

from typing import Any

from fairseq_deep.tools import figures

from .picture import MARKERS


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw a line per ``line`` of *rows*, with minimum and maximum over seeds."""
    measure, name = ("bleu", "BLEU") if any(row.get("bleu") for row in rows) else ("valid_loss", "valid loss")
    figure = figures.new_figure(5.4, 3.6)
    axes = figure.subplots()
    for index, line in enumerate(dict.fromkeys(row["line"] for row in rows)):
        own = sorted((row for row in rows if row["line"] == line and row.get(measure)), key=lambda row: row["depth"])
        means = [row[measure]["mean"] for row in own]
        below = [row[measure]["mean"] - row[measure]["min"] for row in own]
        above = [row[measure]["max"] - row[measure]["mean"] for row in own]
        look = {"color": figures.COLOURS[index % len(figures.COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.errorbar([row["depth"] for row in own], means, yerr=[below, above], capsize=3, linewidth=1.4,
                      markersize=5, label=line, **look)  # fmt: skip
    axes.set_ylabel(name)
    axes.set_xlabel("layers")
    axes.grid(alpha=0.25)
    axes.set_xticks(sorted({row["depth"] for row in rows}))
    axes.legend(fontsize=8, frameon=False)
    figures.save_figure(figure, path)
