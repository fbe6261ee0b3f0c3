"""Write what follows from the declarations of methods: ``python -m tests.helpers.renew``.

These are parameter counts of named architectures, rows of docs/methods/README.md, the family tree
docs/figures/lineage.svg, and the snapshots. Read the difference before committing it.
"""

import inspect
import json
import runpy

from fairseq_deep.core.description import AXES
from fairseq_deep.plugin.architectures import COUNTS, count_parameters, list_archs
from tests.helpers import snapshots
from tests.helpers.paths import ROOT

MAP = ROOT / "docs/methods/README.md"


def write_counts():
    """The counts that ``fairseq-deep archs`` prints; only new architectures are built."""
    with open(COUNTS, encoding="utf-8") as stream:
        known = json.load(stream)
    with open(COUNTS, "w", encoding="utf-8") as stream:
        json.dump({name: known.get(name) or count_parameters(name) for name in list_archs()}, stream, indent=0)
        stream.write("\n")


def with_rows(page):
    """*page* with a row for each method that the section of its axis lacks: link, paper, first line of its module."""
    for registry, _ in AXES.values():
        headings = [line for line in page.splitlines(keepends=True) if line.startswith("## ")]
        before, heading, rest = page.partition(next(line for line in headings if f"`{registry.kind}`" in line))
        section, end, after = rest.partition("\n## ")
        for name in registry.names():
            if f"`{name}`" not in section and f"`{registry.kind} {name}`" not in section:
                method = registry.get(name)
                module = inspect.getmodule(method)
                link = f"[`{name}`]({module.__name__.split('.')[-1]}.md)"
                source, idea = f", {method.paper}" if method.paper else "", module.__doc__.splitlines()[0].rstrip(".")
                row = f"| {link}{source} | {idea} |\n" if "\n|---" in section else f"- {link}{source}: {idea}\n"
                section = section.rstrip("\n") + "\n" + row
        page = before + heading + section + end + after
    return page


if __name__ == "__main__":
    write_counts()
    MAP.write_text(with_rows(MAP.read_text(encoding="utf-8")), encoding="utf-8")
    runpy.run_path(str(ROOT / "docs/figures/lineage.py"), run_name="__main__")
    snapshots.write()
