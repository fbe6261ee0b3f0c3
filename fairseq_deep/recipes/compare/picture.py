"""The picture of a comparison: validation loss during training, and BLEU against model size."""

import math
import statistics

from matplotlib.ticker import FuncFormatter, MaxNLocator

from fairseq_deep.tools import figures

STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osv^DXP"
MANY = 10  # with more systems, the right panel is a ranking


def draw(rows, path):
    """Draw the systems that have results, with common numbers in both panels and the legend."""
    shown = [(number, row) for number, row in enumerate(rows, 1) if row["done"]]
    many = len(shown) > MANY
    figure = figures.new_figure(13 if many else 12, max(4.6, 1.2 + 0.23 * len(shown)))
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1] if many else [1.1, 1])
    for number, row in shown:
        _draw_curve(left, number, row, _look(number))
    left.margins(x=0.06)  # room for the numbers
    left.set(xlabel="updates", ylabel="validation loss", title="Validation loss while training")
    measure, name = ("bleu", "BLEU") if any(row["bleu"] for _, row in shown) else ("valid_loss", "validation loss")
    shown_right = [(number, row) for number, row in shown if row[measure]]
    (_rank if many else _scatter)(right, shown_right, measure, name)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.draw_without_rendering()  # the positions of numbers depend on the final layout
    _number_ends(left, shown)
    if not many:
        _number_points(right, shown_right, measure)
    seeds = max(len(row["done"]) for _, row in shown)
    title = f"{seeds} seeds: mean and range" if seeds > 1 else "1 seed"
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False, title=title)
    figures.save_figure(figure, path)


def _scatter(axes, shown, measure, name):
    for number, row in shown:
        _draw_point(axes, row["parameters"], row[measure], _look(number), "y")
    axes.set(xlabel="parameters", ylabel=name, title=f"{name[0].upper()}{name[1:]} and size")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}M"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.margins(0.1, 0.12)
    sizes = [row["parameters"] for _, row in shown]
    middle, half = (min(sizes) + max(sizes)) / 2, 0.6 * (max(sizes) - min(sizes))
    half = max(half, 0.05 * middle)  # a difference of 0.1 % must not look large
    axes.set_xlim(middle - half, middle + half)


def _rank(axes, shown, measure, name):
    """Draw one row per system, best on top, since many systems have nearly the same size."""
    sign = 1 if measure == "bleu" else -1
    ranked = sorted(shown, key=lambda entry: sign * entry[1][measure]["mean"])
    for place, (number, row) in enumerate(ranked):
        _draw_point(axes, place, row[measure], _look(number), "x")
    axes.set_yticks(range(len(ranked)), [f"{number}   {row['parameters'] / 1e6:.2f}M" for number, row in ranked])
    axes.tick_params("y", labelsize=8)
    axes.set(xlabel=name, title=f"{name[0].upper()}{name[1:]} and size (system, parameters)")
    axes.set_ylim(-0.7, len(ranked) - 0.3)


def _look(number):
    """Return the style of a system: the first is black; repeated colours have new line styles and markers."""
    colours = [figures.COLOURS[-1], *figures.COLOURS[:-1]]
    turn, index = divmod(number - 1, len(colours))
    style = {"color": colours[index], "linestyle": STYLES[turn % len(STYLES)]}
    return {**style, "marker": MARKERS[(turn + index) % len(MARKERS)]}


def _draw_curve(axes, number, row, look):
    curves = [row["curve"][seed] for seed in row["done"]]
    updates = sorted(set.intersection(*map(set, curves)))
    means = [statistics.fmean(curve[update] for curve in curves) for update in updates]
    style = {key: look[key] for key in ("color", "linestyle")}
    width, order = (2.2, 3) if number == 1 else (1.4, 2)
    axes.plot(updates, means, label=f"{number}  {row['system']}", linewidth=width, zorder=order, **style)
    if len(curves) > 1:
        band = [[pick(curve[update] for curve in curves) for update in updates] for pick in (min, max)]
        axes.fill_between(updates, *band, color=look["color"], alpha=0.15, linewidth=0)


def _draw_point(axes, place, figure, look, direction):
    mean = figure["mean"]
    error = {f"{direction}err": [[mean - figure["min"]], [figure["max"] - mean]]}
    x, y = (mean, place) if direction == "x" else (place, mean)
    style = {"color": look["color"], "marker": look["marker"], "markersize": 6, "capsize": 2.5, "linewidth": 1.2}
    axes.errorbar(x, y, **error, **style, linestyle="none")


def _number_ends(axes, shown):
    """Place each number next to the end of its curve, without overlap."""
    ends = []
    low, high = axes.get_ylim()
    for number, row in shown:
        update, losses = _end(row)
        if low <= losses <= high:
            ends.append((axes.transData.transform((update, losses))[1], number, update))
    ends.sort()
    heights = _apart([at for at, _, _ in ends], 9 * axes.figure.dpi / 72)
    for height, (_, number, update) in zip(heights, ends):
        place = axes.transData.inverted().transform((0, height))[1]
        axes.annotate(
            str(number), (update, place), xytext=(8, 0), textcoords="offset points", fontsize=8, va="center",
            color=_look(number)["color"], annotation_clip=False,
        )  # fmt: skip


def _apart(places, gap):
    """Return the sorted *places*, moved apart until adjacent ones differ by *gap*."""
    places = list(places)
    for _ in range(1000):
        close = [k for k in range(len(places) - 1) if places[k + 1] - places[k] < gap - 0.1]
        for k in close:
            missing = gap - (places[k + 1] - places[k])
            places[k] -= missing / 2
            places[k + 1] += missing / 2
        if not close:
            break
    return places


def _end(row):
    """Return the last update that all seeds have, and its mean loss; NaN without such an update."""
    curves = [row["curve"][seed] for seed in row["done"]]
    update = max(set.intersection(*map(set, curves)), default=None)
    return update, math.nan if update is None else statistics.fmean(curve[update] for curve in curves)


def _number_points(axes, shown, measure):
    """Place each number next to its point, on the side with the most free space."""
    taken = [axes.transData.transform((row["parameters"], row[measure]["mean"])) for _, row in shown]
    places = [(11, 0), (-11, 0), (9, 11), (-9, 11), (9, -11), (-9, -11), (22, 0), (-22, 0), (20, 16), (-20, -16)]
    dots = axes.figure.dpi / 72
    for index, (number, row) in enumerate(shown):
        own = taken[index]
        others = [point for place, point in enumerate(taken) if place != index]

        def room(offset, own=own, others=others):
            x, y = own[0] + offset[0] * dots, own[1] + offset[1] * dots
            spots = (max(abs(x - there[0]) / 1.3, abs(y - there[1])) for there in others)
            return min(min(spots, default=99), 11 * dots) - 0.02 * abs(offset[0])

        best = max(places, key=room)
        axes.annotate(
            str(number), (row["parameters"], row[measure]["mean"]), xytext=best, textcoords="offset points",
            ha="center", va="center", fontsize=8,
        )  # fmt: skip
        taken.append((own[0] + best[0] * dots, own[1] + best[1] * dots))
