"""How many files are changed at random, and how they are drawn."""

import os

from hypothesis import HealthCheck, settings

import fairseq_deep  # noqa: F401 (registers its task)

TIMES = int(os.environ.get("FAIRSEQ_DEEP_FUZZ", 1))


def examples(count):
    return settings(max_examples=count * TIMES, derandomize=TIMES == 1, database=None, deadline=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip
