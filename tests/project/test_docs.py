"""The pages: lines of at most 120 characters, sentences of at most 40 words, links to files that exist."""

import re

import pytest

from tests.helpers.docs import PAGES, prose, sentences, words
from tests.helpers.paths import ROOT

READ = [page for page in PAGES if page.parts[0] in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples")]
WIDTH, WORDS = 120, 40


TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_lines_are_at_most_120_wide():
    """Rows of tables cannot be broken."""
    wrong = [f"{page}: {line}" for page, text in TEXTS.items() for line in text.splitlines()
             if len(line) > WIDTH and not line.startswith("|")]  # fmt: skip
    assert wrong == []


def test_no_sum_is_broken_before_its_plus():
    """Markdown makes an item of a list of it."""
    assert [(str(page), line) for page, text in TEXTS.items() for line in re.findall(r"(?m)^ {0,3}\+ .*", text)] == []


def test_links_lead_to_files():
    """Each relative link; ``tests/docs.sh`` checks the anchors, too, but it is not part of the suite."""
    broken = []
    for page, text in TEXTS.items():
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`(?!\])", "", text)
        targets = [it for it in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in it]
        broken += [f"{page}: {it}" for it in targets if not ((ROOT / page).parent / it).exists()]
    assert broken == []


def test_sentences_have_at_most_40_words():
    wrong = [(str(page), text) for page in READ for paragraph in prose(TEXTS[page]) for text in sentences(paragraph)
             if words(text) > WORDS]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("folder", ["docs", "examples", "benchmarks", "third_party"])
def test_the_site_has_a_line_for_each_page(folder):
    """mkdocs would stop at one that is in no line; the hook nav.py adds the pages of methods."""
    listed = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    pages = [page for page in PAGES if page.is_relative_to(folder) and not {"site", "methods"} & {*page.parts}]
    missing = [str(page) for page in pages if not re.search(rf" {re.escape(str(page))}\n", listed)]
    assert pages and not missing, f"add to nav in docs/site/mkdocs.yml: {', '.join(missing)}"
