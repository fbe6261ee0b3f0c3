"""Dry runs, help texts, flags, architectures and initial values, compared with ``tests/snapshots``."""

import pytest

from tests.helpers.snapshots import FOLDER, cases, text_of

CASES = cases()


def test_every_file_has_a_case():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_snapshot(name):
    found, stored = text_of(CASES[name]), (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert found.splitlines() == stored.splitlines(), "if intended: python -m tests.helpers.snapshots"
