"""Draw the lineage of the methods: `python docs/figures/lineage.py` writes docs/figures/lineage.svg from lineage.json.

An arrow leads from a method to one that extends it, contains it as a case, or was proposed in its place. A method
without an entry in lineage.json has the year of its ``paper``, the lane of its axis, and no arrow.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from fairseq_deep.tools.pictures import COLOURS, new_figure, save_figure  # noqa: E402

WIDTH, HEIGHT = 0.86, 0.62  # of a box, in years and rows
NAME = 20
"""Characters of a line in a box."""


LANES = {"layer_agg": "layers", "residual": "sublayers", "deep_init": "starts"}


def complete(record):
    """*record* with the methods that it lacks."""
    from fairseq_deep.core.description import AXES

    methods = list(record["methods"])
    for axis, (registry, _) in AXES.items():
        for name in registry.names():
            flag, year = f"{registry.kind} {name}", registry.get(name).paper[-4:]
            if year.isdigit() and not any(flag in method["flags"] for method in methods):
                lane = LANES.get(axis, "decoder")
                used = {method["row"] for method in methods if (method["lane"], method["year"]) == (lane, int(year))}
                row = next(row for row in range(len(used) + 1) if row not in used)
                methods.append({"name": name, "year": int(year), "lane": lane, "row": row, "flags": [flag], "from": []})
    return {**record, "methods": methods}


def places(record):
    """Return ``{name: (year, row)}`` of the methods, and ``{lane: (first row, rows)}``."""
    found, lanes, top = {}, {}, 0.0
    for lane in record["lanes"]:
        own = [method for method in record["methods"] if method["lane"] == lane]
        found.update({method["name"]: (method["year"], top + method["row"]) for method in own})
        lanes[lane] = (top, 1 + max(method["row"] for method in own))
        top += lanes[lane][1] + 0.75
    return found, lanes


def draw(record):
    """The figure of *record*."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    found, lanes = places(record)
    figure = new_figure(12, 10.4)
    axes = figure.add_subplot()
    colours = dict(zip(record["lanes"], COLOURS))
    for lane, (top, rows) in lanes.items():
        axes.axhspan(top - 0.85, top + rows - 0.55, color=colours[lane], alpha=0.06, linewidth=0)
        title = {"color": colours[lane], "fontsize": 10, "weight": "bold"}
        axes.text(2015.5, top - 0.6, record["lanes"][lane], va="center", **title)
    for method in record["methods"]:
        year, row = found[method["name"]]
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": "white", "linewidth": 1.2, "zorder": 2}
        corner = (year - WIDTH / 2, row - HEIGHT / 2)
        box = FancyBboxPatch(corner, WIDTH, HEIGHT, edgecolor=colours[method["lane"]], **style)
        axes.add_patch(box)
        label = method.get("label", method["name"])
        axes.text(year, row, wrapped(label), ha="center", va="center", fontsize=7.5, zorder=3)
        for parent in method["from"]:
            axes.add_patch(arrow(FancyArrowPatch, found[parent], (year, row), colours[method["lane"]]))
    axes.set_xlim(2015.4, 2026.6)
    axes.set_ylim(max(top + rows for top, rows in lanes.values()) - 0.4, -0.95)
    axes.set_xticks(range(2016, 2027))
    axes.tick_params(left=False, labelleft=False, top=True, labeltop=True)
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def arrow(kind, start, end, colour):
    """An arrow between two boxes: from side to side, or within one year from below to above."""
    (x, y), (u, v) = start, end
    if x == u:
        down = 1 if v > y else -1
        ends = ((x, y + down * HEIGHT / 2), (u, v - down * HEIGHT / 2))
    else:
        ends = ((x + WIDTH / 2, y), (u - WIDTH / 2, v))
    style = "arc3,rad=0" if abs(v - y) < 0.1 or x == u else "arc3,rad=0.08"
    return kind(*ends, arrowstyle="-|>", mutation_scale=8, color=colour, linewidth=0.9, alpha=0.75, zorder=1,
                connectionstyle=style, shrinkA=0, shrinkB=1)  # fmt: skip


def wrapped(name):
    """*name* on two lines where it is long."""
    words = name.split(" ")
    if len(name) <= 12 or len(words) == 1:
        return name.replace("-Connections", "-\nConnections") if len(name) > NAME - 5 else name
    middle = min(range(1, len(words)), key=lambda cut: abs(len(" ".join(words[:cut])) - len(name) / 2))
    return " ".join(words[:middle]) + "\n" + " ".join(words[middle:])


if __name__ == "__main__":
    record = complete(json.loads((HERE / "lineage.json").read_text(encoding="utf-8")))
    save_figure(draw(record), str(HERE / "lineage.svg"))
