"""Words of a fairseq-train command."""

import re
from collections.abc import Iterable


def flags_of(words: Iterable[str]) -> dict[str, str]:
    """Return {flag: its last value} for the words of a fairseq-train command; "" for a flag without a value."""
    found: dict[str, str] = {}
    flag = None
    for word in words:
        if re.match(r"--?[a-zA-Z]", word):
            flag, _, value = word.partition("=")
            found[flag] = value
        elif flag:
            found[flag] = f"{found[flag]} {word}".strip()
    return found
