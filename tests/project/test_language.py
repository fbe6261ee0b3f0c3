"""Wording: phrases that read like a literal translation are rare in each file."""

import pytest

from tests.helpers.language import files, hits, over
from tests.helpers.paths import ROOT


def test_phrases_are_rare():
    found = {str(path.relative_to(ROOT)): over(path) for path in files()}
    assert {name: phrases for name, (phrases, too_many) in found.items() if too_many} == {}


@pytest.mark.parametrize("text, found", [
    ("It goes on alone, told once a step.", ["goes on", "alone", "told", "once a"]),
    ("What remains, what it is, what you see", ["What remains", "what it"]),
    ("That of the first has not, too, stood aside", ["That of", "has not", ", too"]),
    ("per layer; a layer, an update of it; aloneness, understands", ["a layer,"]),
])  # fmt: skip
def test_phrases(text, found):
    assert hits(text) == found
