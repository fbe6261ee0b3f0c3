"""Draw BLEU against decoding speed: `python docs/figures/deep_shallow.py` writes deep_shallow.svg from the records."""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "results")]

from figures import half_width, speeds, values  # noqa: E402

from fairseq_deep.tools.pictures import COLOURS, new_figure, save_figure  # noqa: E402

SCORES = "six-24"
SYSTEMS = {  # name: system of the scores, system of the speeds
    "6 + 6, stock fairseq": ("pre", "stock"),
    "6 + 6, CTranslate2": ("pre", "ctranslate2"),
    "6 + 6, plain": ("pre", "pre"),
    "6 + 6, transformer_modern": ("modern", "modern"),
    "12 + 1, transformer_modern": ("modern_12_1", "modern_12_1"),
}
COLOUR = dict(zip(SYSTEMS, ("#000000", "#777777", *COLOURS)))
PANELS = {"batches of 32 sentences": "real", "one by one": "real-one"}  # title: test of the speeds


def draw_panel(axes, title, test):
    """Draw a line per system from its speed in fp32 to its speed in int8, with 95 % intervals of its BLEU."""
    for name, (system, decoder) in SYSTEMS.items():
        found = [speeds(test).get(decoder + kind) for kind in ("", "-int8")]
        bleu = values(SCORES, system, "bleu")
        for speed, marker in zip(found, "os"):
            if speed:
                axes.errorbar(speed["sentences_per_second"], statistics.fmean(bleu), yerr=half_width(bleu),
                              fmt=marker, color=COLOUR[name], capsize=3, lw=1)  # fmt: skip
        shown = [speed["sentences_per_second"] for speed in found if speed]
        axes.plot(shown, [statistics.fmean(bleu)] * len(shown), color=COLOUR[name], lw=1.2, label=name)
    axes.set(title=title, xlabel="sentences per second, one thread")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def draw(path):
    """Draw a panel for batches and one for single sentences."""
    figure = new_figure(9.6, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, test) in zip(panels, PANELS.items()):
        draw_panel(axes, title, test)
    panels[0].set_ylabel("BLEU (bars: 95 % interval)")
    kinds = zip("os", ("fp32", "int8"))
    marks = [panels[0].plot([], [], marker, color="#777777", label=kind)[0] for marker, kind in kinds]
    lines = [line for line in panels[0].get_lines() if line.get_label() in SYSTEMS]
    figure.legend(handles=[*marks, *lines], loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save_figure(figure, path)


if __name__ == "__main__":
    draw(str(HERE / "deep_shallow.svg"))
