"""Tags of target languages, such as ``<2de>``, at the start of the sources of multilingual models.

Improving Massively Multilingual Neural Machine Translation and Zero-Shot Translation, Zhang et al., ACL 2020. The
module is separate from :mod:`~fairseq_deep.core.languages` because recipes prepare text without loading torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TAG = re.compile(r"<2[^\s>]+>")
"""The tag of a target language."""


def tag_indices(symbols: Iterable[str]) -> list[int]:
    """Return the indices of the language tags among the *symbols* of a dictionary."""
    return [index for index, symbol in enumerate(symbols) if TAG.fullmatch(symbol)]
