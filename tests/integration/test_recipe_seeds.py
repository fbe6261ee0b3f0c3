"""The recipe with several references."""

import json

import pytest

from tests.integration import test_recipe as recipes
from tests.integration.test_recipe import assert_refused, check

corpus = recipes.corpus


def write_references(corpus, *numbers, count=11):
    for number in numbers:
        (corpus / f"test.de.ref{number}").write_text("".join(f"das  Haus {number}\n" for _ in range(count)))


class TestReferences:
    def test_further_references_are_copied_and_recorded(self, corpus, tmp_path):
        write_references(corpus, 1, 2)
        done = check(corpus, tmp_path / "out")
        assert done.returncode == 0 and "3 references for each sentence" in done.stdout
        assert (tmp_path / "out/test.de.ref2").read_text() == "das Haus 2\n" * 11
        facts = json.loads((tmp_path / "out/data.json").read_text())
        assert list(facts["sets"]["test"]["references"]) == ["test.de.ref1", "test.de.ref2"]

    @pytest.mark.parametrize("numbers, odd", [((2,), 2), ((1, 3), 3), ((0, 1), 0), (("01",), "01")])
    def test_a_gap_is_refused(self, corpus, tmp_path, numbers, odd):
        write_references(corpus, *numbers)
        assert_refused(check(corpus, tmp_path / "out"), f"test.de.ref{odd}: the first reference is test.de")

    def test_a_missing_line_is_refused(self, corpus, tmp_path):
        write_references(corpus, 1, count=10)
        assert_refused(check(corpus, tmp_path / "out"), "test.de.ref1 has 10 lines, but the test set 11")
        assert not list(tmp_path.glob("out*"))
