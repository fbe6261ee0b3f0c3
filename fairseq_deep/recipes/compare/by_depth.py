"""BLEU (or loss) and speed by depth: Figs. 3 and 4 of Wang et al., 2019."""

from fairseq_deep.tools import figures

from .picture import MARKERS


def draw(records, timed, path):
    """Draw a line per method, with minimum and maximum over seeds, and decoding speed on the right if measured."""
    measure, name = ("bleu", "BLEU") if any(record.get("bleu") for record in records) else ("valid_loss", "valid loss")
    figure = figures.new_figure(9.0 if timed else 5.4, 3.6)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    for index, line in enumerate(dict.fromkeys(record["line"] for record in records if record["line"])):
        own = [record for record in records if record["line"] == line and record.get(measure)]
        own.sort(key=lambda record: record["depth"])
        look = {"color": figures.COLOURS[index % len(figures.COLOURS)], "marker": MARKERS[index % len(MARKERS)],
                "markersize": 5, "label": line}  # fmt: skip
        depths, means = [r["depth"] for r in own], [r[measure]["mean"] for r in own]
        below = [r[measure]["mean"] - r[measure]["min"] for r in own]
        above = [r[measure]["max"] - r[measure]["mean"] for r in own]
        panels[0].errorbar(depths, means, yerr=[below, above], capsize=3, linewidth=1.4, **look)
        if timed:
            shown = [record for record in own if record["label"] in timed]
            speeds = [timed[record["label"]]["tokens_per_second"] for record in shown]
            panels[1].plot([record["depth"] for record in shown], speeds, linewidth=1.4, **look)
    panels[0].set_ylabel(name)
    if timed:
        panels[1].set_ylabel("decoding, tokens per second")
        panels[1].set_ylim(0, 1.08 * max(times["tokens_per_second"] for times in timed.values()))
    for axes in panels:
        axes.set_xlabel("layers")
        axes.grid(alpha=0.25)
        axes.set_xticks(sorted({record["depth"] for record in records if record["depth"]}))
    panels[0].legend(fontsize=8, frameon=False)
    figures.save_figure(figure, path)
