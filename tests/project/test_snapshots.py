"""Dry runs, help texts, flags, architectures and initial values, compared with ``tests/snapshots``."""

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.snapshots import FOLDER, cases, claims, papers, text_of

CASES = cases()


def test_every_configuration_and_documented_command_has_a_plan():
    text = {name: (FOLDER / f"{name}.txt").read_text(encoding="utf-8") for name in CASES if name.startswith("plan_")}
    lines = {line.removeprefix("$ ") for plans in text.values() for line in plans.splitlines()}
    confs = [path for path in (ROOT / "examples").glob("*/conf/*.args") if path.parts[-3] != "compare"]
    lacking = [f"{path.parts[-3]} --conf {path.stem}" for path in confs
               if f" --conf {path.stem}\n" not in text[f"plan_{path.parts[-3]}"]]  # fmt: skip
    assert confs and [*lacking, *{*papers(), *claims()} - lines] == [], "add a line $ COMMAND to tests/snapshots/plan_*"


@pytest.mark.parametrize("name", sorted(CASES))
def test_outputs_are_those_of_the_snapshot(name):
    found, stored = text_of(CASES[name]), (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert found.splitlines() == stored.splitlines(), "if intended: python -m tests.helpers.snapshots"
