"""Random command lines (tests/helpers/draws.py): refused in one line, or trained, saved, loaded and decoded.

100 draws, the same in each run; FAIRSEQ_DEEP_DRAWS=5000 asks for more.
"""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from tests.helpers import draws

PARTS = 5
COUNT = int(os.environ.get("FAIRSEQ_DEEP_DRAWS", 100))


@pytest.mark.parametrize("part", range(PARTS))
def test_a_draw_is_refused_or_holds(small, tmp_path, part):
    refused = held = 0

    @seed(part)
    @settings(max_examples=COUNT // PARTS, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(draws.command_lines())
    def draw(words):
        nonlocal refused, held
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            note(" ".join(words))
            fault, was_refused = draws.fault_of(small, Path(folder), words)
            assert fault == "", fault
        refused, held = refused + was_refused, held + (not was_refused)

    draw()
    assert min(refused, held) > 0, "draws of either kind"


def test_each_flag_of_a_model_can_be_drawn():
    """So that this does not go unnoticed: a flag whose values are words needs a row."""
    own = draws.own_flags()
    assert len(own) > 50 and set(draws.WORDS) <= set(own)
    assert all(own.values())
