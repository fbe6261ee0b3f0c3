"""Draw BLEU against decoding speed: `python docs/figures/deep_shallow.py` writes deep_shallow.svg from the records."""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "results")]

from figures import speeds, values  # noqa: E402

from fairseq_deep.tools.pictures import COLOURS, new_figure, save_figure  # noqa: E402

SYSTEMS = {  # label of the scores: test and name of the speeds, and name in the picture
    "6+6 plain": ("real", "ours", "6 + 6, plain"),
    "6+6 modern": ("real-modern", "modern6", "6 + 6, transformer_modern"),
    "12+1 modern": ("real", "modern", "12 + 1, transformer_modern"),
    "12+1 CompleteP": ("real", "cp", "12 + 1, CompleteP"),
    "12+1 plain": ("real", "plain", "12 + 1, plain"),
}
STYLE = {"textcoords": "offset points", "fontsize": 9}


def draw(path):
    """A line per system from its speed in fp32 to its speed in int8; bars are the range over seeds."""
    figure = new_figure(7.2, 3.8)
    axes = figure.subplots()
    for place, (label, (test, system, name)) in enumerate(SYSTEMS.items()):
        bleu = values("deep-shallow", label, "bleu")
        mean = statistics.fmean(bleu)
        found = [speeds(test)[system + kind]["sentences_per_second"] for kind in ("", "-int8")]
        axes.errorbar(found, [mean] * 2, yerr=[[mean - min(bleu)] * 2, [max(bleu) - mean] * 2], color=COLOURS[place],
                      capsize=3, lw=1.2)  # fmt: skip
        for speed, marker in zip(found, "os"):
            axes.plot(speed, mean, marker, color=COLOURS[place])
        axes.annotate(name, (sum(found) / 2, mean), (0, -16), ha="center", color=COLOURS[place], **STYLE)
    stock = speeds("real")["stock"]["sentences_per_second"]
    score = statistics.fmean(values("deep-shallow", "6+6 plain", "bleu"))
    axes.plot(stock, score, "o", color="#000000")
    axes.annotate("6 + 6 in\nstock fairseq", (stock, score), (0, -28), ha="center", **STYLE)
    for marker, name in zip("os", ("fp32", "int8")):
        axes.plot([], [], marker, color="#777777", label=name)
    axes.set(xlabel="sentences per second, one thread", ylabel="BLEU", xlim=(0, 1800), ylim=(26, 37))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(loc="lower left", fontsize=8, frameon=False)
    save_figure(figure, path)


if __name__ == "__main__":
    draw(str(HERE / "deep_shallow.svg"))
