"""Pages of the documentation as text."""

import re
import shlex
from itertools import takewhile

from tests.helpers.paths import ROOT

PAGES = sorted(
    path.relative_to(ROOT)
    for folder in (".", "docs", "examples", "benchmarks", "third_party")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
BLOCK = re.compile(r"^ *(```|~~~|\$\$$)")
ITEM = re.compile(r"^ *([-*]|\d+\.) ")
OPERATORS = ("|", "||", "&&", "&", ";", "<", ">", ">>", "2>")


def prose(text):
    """The paragraphs and the items of lists of a page, without code, equations, tables and headings."""
    paragraphs, fenced = [[]], False
    for line in text.splitlines():
        if BLOCK.match(line):
            fenced = not fenced
        elif fenced or line.startswith(("#", "|")) or not line.strip():
            paragraphs.append([])
        elif ITEM.match(line):
            paragraphs.append([ITEM.sub("", line)])
        elif paragraphs[-1] or not line.startswith("    "):
            paragraphs[-1].append(line.strip())
    return [" ".join(lines) for lines in paragraphs if lines]


def sentences(paragraph):
    """The sentences of a paragraph; code and an equation count as one word each, a link as the words that it shows."""
    text = re.sub(r"`[^`]*`|\$[^$\s](?:[^$]*[^$\s])?\$", "CODE", paragraph)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(et al|Eq|Fig|e\.g|i\.e)\.", r"\1", text)
    return re.split(r"(?<=[.!?])[)\"*_]*\s+", text)


def words(sentence):
    return len(re.findall(r"[A-Za-z0-9][^\s/|]*", sentence))


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
