"""Tables and figures of the pages, compared with the runs in ``docs/results/records``."""

import importlib.util
import re

import pytest

from fairseq_deep.tools.results import read
from tests.helpers.paths import ROOT

SPEC = importlib.util.spec_from_file_location("figures", ROOT / "docs/results/figures.py")
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)
NAMES = {str(page.relative_to(ROOT)): page for page in figures.PAGES}
RECORDS = {path.stem: path for path in sorted(figures.RECORDS.glob("*.jsonl")) if path.stem != "decoding"}


MARK = re.compile(r"<!-- table: ([a-z0-9-]+) -->")
PAPERS = ("docs/methods/", "benchmarks/")  # pages that quote scores of papers, and of other models
QUOTING = [name for name in NAMES if not name.startswith(PAPERS)] + [
    f"docs/methods/{name}.md" for name in ("README", "which", "modern", "completep")
]
FIGURE = re.compile(r"\d+\.\d+ ± \d+\.\d+|\d+\.\d\d+(?= BLEU| nats)")


def text_of(name):
    """The words of a page, without computed tables and the targets of links."""
    text = figures.TABLE.sub("", NAMES[name].read_text(encoding="utf-8"))
    return re.sub(r"\]\([^)]*\)", "", " ".join(text.split()))


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_computed_from_the_records(name):
    text = NAMES[name].read_text(encoding="utf-8")
    assert figures.rendered(text) == text, "run: python docs/results/figures.py"


def test_every_table_is_on_a_page():
    marked = [table for page in figures.PAGES for table in MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(marked) == sorted(figures.TABLES)


@pytest.mark.parametrize("name", QUOTING)
def test_quoted_figures_are_computed_from_the_records(name):
    """Differences with intervals, and BLEU and nats with two decimals."""
    assert {*FIGURE.findall(text_of(name))} <= figures.quoted()


@pytest.mark.parametrize("name", RECORDS)
def test_records_can_be_read(name):
    for run in read(str(RECORDS[name])):
        assert run["commit"] and run["hardware"] and run["flags"] and run["environment"]["torch"]


def test_corrected_p():
    corrected = figures.holm("modern-methods", "pre")
    assert corrected["value"] == "0.021" and corrected["denseformer"] == "0.024" and corrected["swiglu"] == "1"
