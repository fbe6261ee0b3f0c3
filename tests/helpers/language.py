"""The wording of pages, docstrings, comments and messages: phrases that read like a literal translation.

Run ``python -m tests.helpers.language`` in the root to list hits.
"""

import ast
import inspect
import re

from tests.helpers.docs import PAGES, prose
from tests.helpers.paths import PACKAGE, ROOT

PER_THOUSAND = 3
"""Hits per 1,000 words that a file must stay below; a short file may have one."""
PHRASES = re.compile(
    r"""\b(?:
    what\ (?!it|they|this|that|you|we|is\b)\w+ | what\ (?:is|it)\b | whose | told | alone | so\ that | beside | stands?
    | anew | whoever | torn | waits? | (?:has|have)\ not | once\ an? | (?:those|that)\ of | all\ (?:that|else)
    | goes?\ on | are\ (?:kept|made|taken|looked) | an?\ (?:layer|sentence|hypothesis|step|update|word|line)\b[,.;:)]
    )(?!\w) | ,\ too\b""",
    re.IGNORECASE | re.VERBOSE,
)
CODE = re.compile(r"``[^`]*``|`[^`]*`")


def text_of(path):
    """Return the words of a page without code and tables, or the docstrings and messages of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        text = "\n\n".join(inspect.cleandoc(each) for each in constants if isinstance(each, str))
    return " ".join(CODE.sub("CODE", re.sub(r"\]\([^)]*\)", "]", " ".join(prose(text)))).split())


def hits(text):
    """Return the phrases in a text."""
    return [match[0] for match in PHRASES.finditer(text)]


def files():
    """Return the pages, and the modules of the package."""
    return [*(ROOT / page for page in PAGES), *sorted(PACKAGE.rglob("*.py"))]


def over(path):
    """Return the hits of a file, and whether they are too many."""
    text = text_of(path)
    found = hits(text)
    return found, len(found) > max(1, (PER_THOUSAND * len(text.split()) - 1) // 1000)


if __name__ == "__main__":
    for each in files():
        if over(each)[0]:
            print(f"{each.relative_to(ROOT)}: {', '.join(over(each)[0])}")
