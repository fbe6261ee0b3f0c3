"""Pages of the documentation as text."""

import shlex
from itertools import takewhile

from tests.helpers.paths import ROOT

PAGES = sorted(
    path.relative_to(ROOT)
    for folder in (".", "docs", "examples", "benchmarks", "third_party")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
OPERATORS = ("|", "||", "&&", "&", ";", "<", ">", ">>", "2>")


def code_of(page):
    """The first Python code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


def command_lines(page, program):
    """The commands of a page's code blocks that run *program*, as lists of words without redirections."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    fenced, found = False, []
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or line.startswith("    "):
            words = list(_words(line))
            starts = [place for place, word in enumerate(words) if word == program]
            found += [list(takewhile(lambda word: word not in OPERATORS, words[start:])) for start in starts]
    return found


def _words(line):
    reader = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    reader.whitespace_split = True
    try:
        return list(reader)
    except ValueError:  # not a shell command
        return []
