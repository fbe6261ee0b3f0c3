"""How many files are changed at random, and how they are drawn: a small fixed sample, and many at night."""

import os

import pytest
from hypothesis import HealthCheck, given, settings

import fairseq_deep  # noqa: F401 (registers its task)

TIMES = int(os.environ.get("FAIRSEQ_DEEP_FUZZ", 1))


def fuzzed(count, **strategies):
    """Call a test *count* times with values of *strategies*, always the same; at night more often, with others."""
    usual = settings(max_examples=count * TIMES, derandomize=TIMES == 1, database=None, deadline=None,
                     suppress_health_check=list(HealthCheck))  # fmt: skip
    return lambda check: pytest.mark.fuzz(usual(given(**strategies)(check)))
