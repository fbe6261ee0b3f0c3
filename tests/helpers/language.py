"""The wording of pages, docstrings, comments and messages: phrases that read like a literal translation.

Run ``python -m tests.helpers.language`` in the root to list hits, and with ``--lower`` to lower the ceilings in
``tests/data/language.json`` to the present counts.
"""

import json
import re
import sys

from tests.helpers.docs import PAGES, prose
from tests.helpers.paths import PACKAGE, ROOT

CEILINGS = ROOT / "tests/data/language.json"
PER_THOUSAND = 3
"""Hits per 1,000 words that a file without a ceiling must stay below."""
PHRASES = re.compile(
    r"""\b(?:
    what\ (?!it|they|this|that|you|we|is\b)\w+ | what\ (?:is|it)\b | whose | told | alone | so\ that | beside | stands?
    | anew | whoever | torn | waits? | (?:has|have)\ not | once\ an? | (?:those|that)\ of | all\ (?:that|else)
    | goes?\ on | are\ (?:kept|made|taken|looked) | an?\ (?:layer|sentence|hypothesis|step|update|word|line)\b[,.;:)]
    )(?!\w) | ,\ too\b""",
    re.IGNORECASE | re.VERBOSE,
)
CODE = re.compile(r"``[^`]*``|`[^`]*`")
PYTHON = re.compile(r'"""(?P<long>[\s\S]*?)"""|"(?P<short>(?:\\.|[^"\\\n])*)"|#(?P<comment>.*)')
"""Docstrings, other strings and comments; strings have double quotes."""


def text_of(path):
    """Return the words of a file as one line, without code and tables."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = [match.group(match.lastgroup) for match in PYTHON.finditer(text)]
        lines = [line for each in found for line in each.splitlines() if not line.lstrip().startswith(("|", ">>>"))]
        text = re.sub(r"\{[^{}]*\}", "CODE", " ".join(lines))
    else:
        text = re.sub(r"\]\([^)]*\)", "]", " ".join(prose(text)))
    return " ".join(CODE.sub("CODE", text).split())


def hits(text):
    """Return the phrases in a text."""
    return [match[0] for match in PHRASES.finditer(text)]


def files():
    """Return the pages, and the modules of the package."""
    return [*(ROOT / page for page in PAGES), *sorted(PACKAGE.rglob("*.py"))]


def ceiling_of(name, count, ceilings):
    """Return the most hits that a file may have: its own ceiling, or fewer than 3 per 1,000 of its words.

    Args:
        count: number of its words
    """
    return ceilings.get(name, max(1, (PER_THOUSAND * count - 1) // 1000))


def main(lower):
    """List the hits of each file; with *lower*, write the lower ceilings."""
    ceilings, texts = json.loads(CEILINGS.read_text()), {str(path.relative_to(ROOT)): text_of(path) for path in files()}
    for name, text in texts.items():
        found = hits(text)
        if found:
            print(f"{1000 * len(found) / len(text.split()):5.1f} {len(found):4} {name}: {', '.join(found[:6])}")
    if lower:
        lower = {name: min(ceilings[name], len(hits(texts[name]))) for name in sorted(ceilings) if name in texts}
        kept = {name: most for name, most in lower.items() if most > ceiling_of(name, len(texts[name].split()), {})}
        CEILINGS.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    main("--lower" in sys.argv[1:])
