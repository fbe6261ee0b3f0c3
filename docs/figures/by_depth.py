"""Draw training by depth: `python docs/figures/by_depth.py` writes the pictures of PICTURES from the stored runs."""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from fairseq_deep.tools.pictures import COLOURS, new_figure, save_figure  # noqa: E402
from fairseq_deep.tools.results import by_system, read, spread  # noqa: E402

PICTURES = {  # file: runs, range of losses, and systems with their names, colours and lines
    "by_depth.svg": ("depth", (4.6, 8.0), {
        "pre_6": ("plain, 6 layers", COLOURS[0], "-"),
        "pre_20": ("plain, 20 layers", COLOURS[0], "--"),
        "dlcl_6": ("DLCL, 6 layers", COLOURS[1], "-"),
        "dlcl_20": ("DLCL, 20 layers", COLOURS[1], "--"),
        "completep_6": ("CompleteP, 6 layers", COLOURS[2], "-"),
        "completep_20": ("CompleteP, 20 layers", COLOURS[2], "--"),
    }),
    "depth_pays.svg": ("large-updates-6-24", (5.7, 7.1), {
        "completep_6-rate0.008": ("CompleteP, 6 layers", COLOURS[2], "-"),
        "completep_24": ("CompleteP, 24 layers", COLOURS[2], "--"),
        "completep_6-updates7290": ("6 layers, computation of 24", COLOURS[4], "-"),
    }),
}  # fmt: skip


def draw(path, stored, limits, systems):
    """Validation loss by update (means over seeds) on the left, BLEU with its range over seeds on the right."""
    figure, runs = new_figure(9.6, 3.6), by_system(read(str(HERE.parent / f"results/records/{stored}.jsonl")))
    losses, scores = figure.subplots(1, 2)
    for place, (system, (name, colour, style)) in enumerate(systems.items()):
        curves = [run["curve"] for run in runs[system].values()]
        means = {int(at): statistics.fmean(curve[at] for curve in curves) for at in curves[0]}
        losses.plot(list(means), list(means.values()), style, color=colour, label=name)
        bleu = spread(run["bleu"] for run in runs[system].values())
        ends = [[bleu["mean"] - bleu["min"]], [bleu["max"] - bleu["mean"]]]
        solid = style == "-"
        scores.bar(place, bleu["mean"], 0.7, yerr=ends, capsize=3, color=colour, alpha=1.0 if solid else 0.55)
        scores.text(place, 1.0, f"{bleu['mean']:.1f}", ha="center", color="white", fontweight="bold")
    seeds = sorted({len(runs[system]) for system in systems})
    losses.set(xlabel="updates", ylabel="validation loss (bits per token)", ylim=limits)
    scores.set(ylabel=f"BLEU (mean and range of {' or '.join(map(str, seeds))} seeds)", xticks=range(len(systems)))
    scores.set_xticklabels([name.replace(", ", "\n") for name, *_ in systems.values()], fontsize=8)
    losses.legend(fontsize=8, frameon=False)
    for axes in (losses, scores):
        axes.grid(alpha=0.25, axis="y")
        axes.set_axisbelow(True)
    save_figure(figure, path)


if __name__ == "__main__":
    for file, picture in PICTURES.items():
        draw(str(HERE / file), *picture)
