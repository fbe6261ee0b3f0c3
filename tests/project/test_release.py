"""One release: the version of the package, the newest one of CHANGELOG.md, CITATION.cff and the workflow by tag."""

import re

import pytest
import yaml

import fairseq_deep
from tests.helpers.docs import prose, sentences, words
from tests.helpers.paths import ROOT

KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""The headings of Keep a Changelog 1.1, in its order."""
WORDS = 25


@pytest.fixture(scope="module")
def changelog():
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_version_and_its_date_are_the_same_everywhere(changelog):
    newest = re.findall(r"(?m)^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog)[0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert newest == (fairseq_deep.__version__, str(citation["date-released"]))
    assert str(citation["version"]) == fairseq_deep.__version__
    install = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert f"expanded_assets/v{fairseq_deep.__version__}" in install


def test_changelog_keeps_the_format(changelog):
    names = re.findall(r"(?m)^## (.*)$", changelog)
    assert names[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", name) for name in names[1:])
    versions = [name.partition("]")[0][1:] for name in names]
    assert re.findall(r"(?m)^\[(.*)\]: https://", changelog) == versions
    for section in changelog.split("\n## ")[1:]:
        kinds = re.findall(r"(?m)^### (.*)$", section)
        assert kinds == [kind for kind in KINDS if kind in kinds]


def test_changelog_has_short_entries(changelog):
    entries = [text for text in prose(changelog.replace("[docs]", "")) if not text.startswith("[")]
    assert len(entries) > 100
    assert not [text for entry in entries for text in sentences(entry) if words(text) > WORDS]
