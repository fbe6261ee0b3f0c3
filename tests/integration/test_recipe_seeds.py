"""The recipe with several references, and averages by updates."""

import json

import pytest

from tests.integration import test_recipe as recipes
from tests.integration.test_recipe import SMALL, assert_refused, check, programs, recipe

tools, corpus, stubs = recipes.tools, recipes.corpus, recipes.stubs


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


def test_an_average_by_updates_without_checkpoints_is_refused(tools, stubs, corpus, tmp_path):
    words = (tools, tmp_path / "exp", "--data", corpus, *SMALL, "--average-updates", "1000")
    assert_refused(recipe(*words), "no checkpoint of every 1000 updates", "--average-updates 0", status=2)
    (tmp_path / "exp/checkpoints/checkpoint_3_1000.pt").touch()
    assert "taking the last one" in recipe(*words).stdout
    (tmp_path / "exp/checkpoints/checkpoint_5_2000.pt").touch()
    programs(stubs)
    assert "only 2 checkpoints exist" in recipe(*words, "--stage", "5", "--stop-stage", "5").stdout
    assert "average --last-updates 2" in stubs.read_text()
