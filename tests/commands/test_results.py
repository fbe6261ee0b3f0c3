"""``results.jsonl``: written whole, read by schema, and the statistics over seeds."""

import json
import math
import statistics
import threading

import pytest
from filelock import FileLock

from fairseq_deep.errors import UsageError
from fairseq_deep.tools import results

RUN = {"system": "a", "seed": 1, "bleu": 20.0, "curve": {"10": 5.0}}


def test_a_run_replaces_its_earlier_line_and_others_stay(tmp_path):
    results.add(str(tmp_path), [RUN, {**RUN, "system": "b"}])
    found = results.add(str(tmp_path), [{**RUN, "bleu": 21.0}, {**RUN, "seed": 2}])
    assert found == results.read(str(tmp_path)) == results.read(str(tmp_path / results.FILE))
    assert [(run["system"], run["seed"], run["bleu"]) for run in found] == [("a", 1, 21), ("b", 1, 20), ("a", 2, 20)]
    assert list(results.by_system(found)["a"]) == [1, 2] and results.read(str(tmp_path / "none.jsonl")) == []


def test_writers_take_turns(tmp_path):
    """Otherwise one of two would write what it had read before the other's line."""
    other = threading.Thread(target=results.add, args=(str(tmp_path), [RUN]))
    with FileLock(tmp_path / results.LOCK):
        other.start()
        other.join(0.5)
        assert other.is_alive() and not (tmp_path / results.FILE).exists()
    other.join(60)
    assert results.read(str(tmp_path)) == [RUN]


@pytest.mark.parametrize("line, part", [
    ({"seed": 1}, "system is missing"), ({**RUN, "curve": {"x": 1.0}}, "an object with a number for each update"),
])  # fmt: skip
def test_a_line_that_is_no_run_is_rejected(tmp_path, line, part):
    (tmp_path / results.FILE).write_text(json.dumps(RUN) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"results\.jsonl:2: ") as problem:
        results.read(str(tmp_path))
    assert part in str(problem.value)


def test_spread():
    assert results.spread([4.0, None, 6.0]) == {"mean": 5, "std": statistics.stdev([4, 6]), "min": 4, "max": 6}
    assert set(results.spread([0.05] * 3).values()) == {0.05, 0.0}  # their mean by fmean is 0.05000000000000001
    assert results.spread([None]) is None and results.spread([4.0])["std"] is None
    assert math.isnan(results.spread([4.0, math.nan])["min"])
