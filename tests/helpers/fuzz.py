"""How many files are changed at random, and how they are drawn: a small fixed sample, and many at night."""

import inspect
import os

import pytest
from hypothesis import HealthCheck, given, settings

import fairseq_deep  # noqa: F401 (registers its task)

TIMES = int(os.environ.get("FAIRSEQ_DEEP_FUZZ", 1))


def examples(count):
    return settings(max_examples=count * TIMES, derandomize=TIMES == 1, database=None, deadline=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip


def fuzzed(few, many, **strategies):
    """Make two tests of a property: *few* examples, always the same, and *many* at night.

    The property takes the names of *strategies*, and fixtures.
    """

    def decorate(check):
        fixtures = [name for name in inspect.signature(check).parameters if name not in strategies]

        @pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.nightly)])
        def test(request, count):
            known = {name: request.getfixturevalue(name) for name in fixtures}

            def holds(**drawn):
                check(**known, **drawn)

            usual = examples(count)
            settings(usual, derandomize=count == few)(given(**strategies)(holds))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
