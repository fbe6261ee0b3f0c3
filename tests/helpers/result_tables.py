"""Tables of figures in Markdown pages, and the records in ``docs/results/`` that they quote."""

import functools
import json
import re

from fairseq_deep.tools.results import by_system, read, spread
from tests.helpers.paths import ROOT

RECORDS = ROOT / "docs/results"


def title(page):
    """The first heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def sections(page):
    """``{heading: tables}`` of a page; a table is a list of rows, the head first, a row a list of cells."""
    found, heading, table = {}, "", None
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading, table = line.lstrip("# "), None
        elif line.startswith("|"):
            cells = [cell.replace("**", "").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if table is None:
                table = []
                found.setdefault(heading, []).append(table)
            if not re.fullmatch(r"[|: -]*-[|: -]*", line):
                table.append(cells)
        else:
            table = None
    return found


def record(name):
    """The record of a page: ``tables``, each with ``columns`` and ``rows``, and ``runs`` if they were kept."""
    with open(RECORDS / f"{name}.json", encoding="utf-8") as stream:
        return json.load(stream)


def value(cell):
    """A cell as a record holds it: a number, a mean with its range, or a text."""
    number = r"[-+]?[\d,]*\.?\d+(?:e-?\d+)?"
    if re.fullmatch(number, cell):
        return float(cell.replace(",", "")) if re.search("[.e]", cell) else int(cell.replace(",", ""))
    ranged = re.fullmatch(rf"({number}) \[({number}), ({number})\]", cell)
    if ranged:
        return dict(zip(("mean", "min", "max"), map(value, ranged.groups())))
    return cell


@functools.cache
def kept_runs(name):
    """The runs in a file of ``docs/results/``."""
    return read(str(RECORDS / name))


def measured(entry, label, measure):
    """The figure of a system in the runs of a record: a mean with its range, or one seed's figure."""
    runs = by_system(kept_runs(entry["runs"]))[label]
    found = spread(run.get(measure) for run in runs.values())
    return found if len(runs) > 1 else found["mean"]
