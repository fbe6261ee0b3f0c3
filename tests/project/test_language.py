"""Wording: phrases that read like a literal translation may only become fewer, file by file."""

import json

import pytest

from tests.helpers.language import CEILINGS, ceiling_of, files, hits, text_of
from tests.helpers.paths import ROOT


def test_hits_only_fall():
    """A file without a ceiling must have fewer than 3 hits per 1,000 words."""
    ceilings, names, problems = json.loads(CEILINGS.read_text()), set(), []
    for path in files():
        name, text = str(path.relative_to(ROOT)), text_of(path)
        names.add(name)
        found, most = hits(text), ceiling_of(name, len(text.split()), ceilings)
        if len(found) > most:
            problems.append(f"{name}: {len(found)} of at most {most} ({', '.join(found)})")
    assert not problems
    assert ceilings.keys() <= names, "remove the ceilings of files that are gone"


@pytest.mark.parametrize("text, found", [
    ("It goes on alone, told once a step.", ["goes on", "alone", "told", "once a"]),
    ("What remains, what it is, what you see", ["What remains", "what it"]),
    ("That of the first has not, too, stood aside", ["That of", "has not", ", too"]),
    ("per layer; a layer, an update of it; aloneness, understands", ["a layer,"]),
])  # fmt: skip
def test_phrases(text, found):
    assert hits(text) == found


def test_code_and_tables_are_no_text(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("# Told\n\n`told` [this](told.md) here\nalone\n\n| told |\n|---|\n\n    told\n")
    module.write_text('"""Told.\n\n| told | told |\n"""\ntold = f"alone {told}"  # beside\n')
    assert text_of(page) == "CODE [this] here alone" and hits(text_of(module)) == ["Told", "alone", "beside"]
