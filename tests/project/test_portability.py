"""docs/portability.md: its table is the record, and verdicts are those of the commands.

A release measures new methods: ``python benchmarks/portability.py --new --write``.
"""

import argparse
import json
import sys
from pathlib import Path

import pytest

from fairseq_deep.plugin.architectures import get_architecture
from fairseq_deep.runtime.plain import NAMES, Unsupported, check_layers
from tests.helpers.models import tiny_flags

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import portability  # noqa: E402

RECORD = json.loads(portability.RECORD.read_text(encoding="utf-8"))


def test_the_table_is_the_record():
    assert {*RECORD["systems"]} <= {*portability.systems()}
    page = portability.PAGE.read_text(encoding="utf-8")
    shown = page.split(portability.BEGIN)[1].split(portability.END)[0]
    assert shown.strip() == portability.table(RECORD)


@pytest.mark.parametrize("name", RECORD["systems"])
def test_layers_are_refused_as_the_record_says(name):
    """fairseq's transformer lacks what transformers' classes lack."""
    architecture, flags = portability.systems()[name]
    tagged = {"num_languages": 20} if "language" in name else {}
    args = argparse.Namespace(**{**tiny_flags(f"transformer_{architecture}"), **tagged, **flags})
    get_architecture(f"transformer_{architecture}").apply(args)
    for form, target in (("ctranslate2", "ctranslate2"), ("huggingface", "class"), ("fairseq", "class")):
        said = ""
        try:
            check_layers("it", args, form)
        except Unsupported as error:
            said = error.message.replace(NAMES["fairseq"], "transformers").removeprefix("it has ")
        assert said == RECORD["systems"][name][target].get("no", "").removeprefix("layers of "), form
