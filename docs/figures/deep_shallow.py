"""Draw BLEU against decoding speed: `python docs/figures/deep_shallow.py` writes deep_shallow.svg from the record."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from fairseq_deep.tools.pictures import COLOURS, new_figure, save_figure  # noqa: E402

SYSTEMS = {  # label of the scores: name in the table of speeds, and in the picture
    "6+6 plain": ("6 + 6, plain", "6 + 6, plain"),
    "6+6 modern": ("6 + 6, `transformer_modern_6l`", "6 + 6, transformer_modern"),
    "12+1 modern": ("12 + 1, `transformer_modern_12l1l`", "12 + 1, transformer_modern"),
    "12+1 CompleteP": ("12 + 1, CompleteP", "12 + 1, CompleteP"),
    "12+1 plain": ("12 + 1, plain", "12 + 1, plain"),
}
STOCK = "6 + 6, stock fairseq"
STYLE = {"textcoords": "offset points", "fontsize": 9}


def middle(cell):
    """Return the mean, minimum and maximum of a cell."""
    return [cell[key] for key in ("mean", "min", "max")] if isinstance(cell, dict) else [cell] * 3


def draw(path):
    """A line per system from its speed in fp32 to its speed in int8; bars are the range over seeds."""
    scores, speeds = json.loads((HERE.parent / "results/deep-encoder-shallow-decoder.json").read_text())["tables"]
    bleu = {label: row[scores["columns"].index("BLEU")] for label, row in zip(scores["labels"], scores["rows"])}
    by_name = {row[0]: row for row in speeds["rows"]}
    columns = [speeds["columns"].index(f"{kind}, batches") for kind in ("fp32", "int8")]
    figure = new_figure(7.2, 3.8)
    axes = figure.subplots()
    for place, (label, (row, name)) in enumerate(SYSTEMS.items()):
        mean, low, high = middle(bleu[label])
        found = [by_name[row][column] for column in columns]
        axes.errorbar(found, [mean] * 2, yerr=[[mean - low] * 2, [high - mean] * 2], color=COLOURS[place], capsize=3,
                      lw=1.2)  # fmt: skip
        for speed, marker in zip(found, "os"):
            axes.plot(speed, mean, marker, color=COLOURS[place])
        axes.annotate(name, (sum(found) / 2, mean), (0, -16), ha="center", color=COLOURS[place], **STYLE)
    stock, score = by_name[STOCK][columns[0]], middle(bleu["6+6 plain"])[0]
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
