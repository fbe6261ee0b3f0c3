"""Figures of the docs against the records in ``docs/results/``: no table may differ from what was measured."""

import itertools
import math
import re
import statistics

import pytest

from fairseq_deep.tools.results import FIGURES, by_system
from tests.helpers import result_tables
from tests.helpers.docs import prose
from tests.helpers.paths import ROOT

OVERVIEW = ROOT / "docs/results.md"
PAGES = dict(sorted((page.stem, page) for page in result_tables.RECORDS.glob("*.md")))
README = {
    "BLEU on real text": ["pre-norm-and-dlcl-by-depth-xavier-s-weights"],
}
"""The tables of the README that quote results, by the start of their first cell, and the records that they quote."""

QUANTILES = {3: 4.3027, 4: 3.1824, 5: 2.7764}
"""97.5 % quantiles of Student's t for the differences of so many seeds."""


def numbers(value):
    """The decimal fractions in a cell of a record."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, str):
        return [float(text) for text in re.findall(r"\d+\.\d+", value)]
    return [float(value)]


def test_each_page_has_a_record_each_record_a_page_and_the_overview_links_to_all():
    assert list(PAGES) == sorted(path.stem for path in result_tables.RECORDS.glob("*.json"))
    linked = re.findall(r"\]\(results/([^)#]+)\.md\)", OVERVIEW.read_text(encoding="utf-8"))
    assert sorted({*linked}) == list(PAGES)


def test_the_overview_counts_the_verdicts_of_each_claim():
    head, *rows = result_tables.sections(OVERVIEW)["The papers' claims"][0]
    counted = {}
    for table in result_tables.record("the-papers-claims")["tables"]:
        verdicts = [part.partition(" (")[0] for row in table["rows"] for part in row[-1].split("; ")]
        assert {*verdicts} <= {*head[2:]}
        counted[table["claim"]] = [verdicts.count(verdict) for verdict in head[2:]]
    assert counted == {claim.partition(": [")[0]: [int(count) for count in counts] for claim, _, *counts in rows}


@pytest.mark.parametrize("name", PAGES)
def test_tables_have_the_figures_of_their_record(name):
    entry = result_tables.record(name)
    tables = [table for found in result_tables.sections(PAGES[name]).values() for table in found]
    assert entry["title"] == result_tables.title(PAGES[name]) and entry["page"] == f"docs/results/{name}.md"
    assert len(entry["tables"]) == len(tables)
    for stored, (head, *rows) in zip(entry["tables"], tables):
        assert stored["columns"] == head and len(stored["rows"]) == len(rows)
        first = ""
        for cells, values in zip(rows, stored["rows"]):
            first = cells[0] or first  # an empty first cell repeats the one above it
            assert [result_tables.value(first), *map(result_tables.value, cells[1:])] == values


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_a_record_are_those_of_its_runs(name):
    """Where runs were kept: ``measures`` maps columns to figures, and ``labels`` rows to systems."""
    entry = result_tables.record(name)
    if "runs" not in entry:
        assert entry["note"].startswith("Transcribed") and not (result_tables.RECORDS / f"{name}.jsonl").exists()
        return
    for table in entry["tables"]:
        measures = table.get("measures", {})
        assert {*measures.values()} <= {*FIGURES, "parameters"} and len(table["labels"]) == len(table["rows"])
        for label, row in zip(table["labels"], table["rows"]):
            for column, measure in measures.items():
                shown = row[table["columns"].index(column)]
                found = result_tables.measured(entry, label, measure)
                pairs = [(shown[part], found[part]) for part in shown] if isinstance(shown, dict) else [(shown, found)]
                for written, computed in pairs:
                    computed = computed["mean"] if isinstance(computed, dict) else computed
                    assert written == pytest.approx(computed, abs=0.51 * 10 ** -table["decimals"][column])


def intervals(runs, measure, factor):
    """The means of differences between two systems with their 95 % confidence intervals over seeds, as pages show them.

    Args:
        runs: {system: {seed: run}}
        factor: unit of the measure
    """
    for one, other in itertools.permutations(runs.values(), 2):
        pairs = [(one[seed].get(measure), other[seed].get(measure)) for seed in one.keys() & other.keys()]
        found = [factor * (first - second) for first, second in pairs if None not in (first, second)]
        if len(found) in QUANTILES:
            half = QUANTILES[len(found)] * statistics.stdev(found) / math.sqrt(len(found))
            for decimals in (2, 3):
                yield f"{statistics.fmean(found):.{decimals}f} ± {half:.{decimals}f}"


@pytest.mark.parametrize("name", PAGES)
def test_differences_in_the_text_of_a_page_are_those_of_its_runs(name):
    """In BLEU or nats, and in nats if the text says so. ``other_intervals`` are of what the runs do not record."""
    entry, text = result_tables.record(name), " ".join(PAGES[name].read_text(encoding="utf-8").split())
    said = re.findall(r"(\d+\.\d+ ± \d+\.\d+)( nats)?", text)
    if not said or "runs" not in entry:
        return
    runs = by_system(result_tables.kept_runs(entry["runs"]))
    bleu, nats = {*intervals(runs, "bleu", 1)}, {*intervals(runs, "valid_nll", math.log(2))}
    known, others = {" nats": nats, "": bleu | nats}, {*entry.get("other_intervals", ())}
    assert others <= {shown for shown, _ in said}
    assert not [shown + unit for shown, unit in said if shown not in known[unit] | others]


def test_kept_runs_can_be_read_and_belong_to_a_record():
    kept = sorted(path.name for path in result_tables.RECORDS.glob("*.jsonl"))
    assert kept == sorted({result_tables.record(name).get("runs") for name in PAGES} - {None})
    for name in kept:
        for run in result_tables.kept_runs(name):
            assert run["commit"] and run["hardware"] and run["flags"] and run["environment"]["torch"]


def known_numbers(names):
    """The decimal fractions in the records with these *names*."""
    tables = [table for name in names for table in result_tables.record(name)["tables"]]
    return [number for table in tables for row in table["rows"] for cell in row for number in numbers(cell)]


def assert_known(text, known):
    for quoted in re.findall(r"\d+\.\d+", text):
        close = 0.5 * 10 ** -len(quoted.partition(".")[2]) + 1e-9
        assert any(abs(float(quoted) - number) <= close for number in known), quoted


@pytest.mark.parametrize("start", README)
def test_tables_of_the_readme_quote_records(start):
    [table] = [
        table for tables in result_tables.sections(ROOT / "README.md").values() for table in tables
        if table[0][0].startswith(start)
    ]  # fmt: skip
    text = " ".join(cell for row in table[1:] for cell in row)
    assert len(re.findall(r"\d+\.\d+", text)) > 5
    assert_known(text, known_numbers(README[start]))


def test_items_of_the_readme_quote_the_records_that_they_link_to():
    """Scores of single systems; differences and p are on the page of a record."""
    checked = 0
    for item in prose((ROOT / "README.md").read_text(encoding="utf-8")):
        names = re.findall(r"\]\(docs/results/([a-z0-9-]+)\.md\)", item)
        text = " ".join((result_tables.RECORDS / f"{name}.md").read_text(encoding="utf-8") for name in names)
        for quoted in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", item) if names else []:
            assert re.search(rf"(?<![\d.]){re.escape(quoted)}", text), quoted
            checked += 1
    assert checked > 3
