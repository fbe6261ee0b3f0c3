"""The family tree and the map of methods, docs/methods/README.md, have every method."""

import importlib.util
import json
import re

from fairseq_deep.core.description import AXES
from tests.helpers.paths import ROOT
from tests.helpers.renew import MAP, with_rows

SPEC = importlib.util.spec_from_file_location("lineage", ROOT / "docs/figures/lineage.py")
lineage = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lineage)
RECORD = lineage.complete(json.loads((ROOT / "docs/figures/lineage.json").read_text(encoding="utf-8")))
METHODS = {method["name"]: method for method in RECORD["methods"]}


def test_every_method_is_there():
    flags = {flag for method in RECORD["methods"] for flag in method["flags"]}
    known = {f"{registry.kind} {name}" for registry, _ in AXES.values() for name in registry.names()}
    assert known - flags == set()
    kinds = {registry.kind for registry, _ in AXES.values()}
    assert {flag for flag in flags if flag.partition(" ")[0] in kinds} == known


def test_the_map_of_methods_has_every_method():
    page = MAP.read_text(encoding="utf-8")
    assert with_rows(page) == page, "run python -m tests.helpers.renew"


def test_the_picture_is_of_these_methods():
    picture = (ROOT / "docs/figures/lineage.svg").read_text(encoding="utf-8")
    shown = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture))
    for name, method in METHODS.items():
        assert all(word in shown for word in re.split(r"[ -]", method.get("label", name))), name
