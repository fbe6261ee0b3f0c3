"""Language tags in the source dictionary (``--language-transform``)."""

from __future__ import annotations

from typing import Any

from fairseq_deep.core.language_tags import tag_indices
from fairseq_deep.core.languages import chosen_flag
from fairseq_deep.core.registry import UsageError

from .hydra import set_flag


def count_languages(args: Any, dictionary: Any) -> list[int]:
    """Return the indices of the language tags in *dictionary*, and store their number in *args* and so in checkpoints.

    Raises:
        UsageError: a flag requires tags and the dictionary has none, or their number differs from ``--num-languages``
    """
    flag = chosen_flag(args)
    if flag is None:
        return []
    tags, given = tag_indices(dictionary.symbols), getattr(args, "num_languages", None)
    if not tags:
        raise UsageError(
            f"{flag} requires language tags in the source dictionary: begin each source with the tag of its target "
            "language, such as <2de>, and binarise again; or omit the flag"
        )
    if given not in (None, len(tags)):
        raise UsageError(
            f"--num-languages {given}: the source dictionary has {len(tags)} language tags; use the dictionary of the "
            "model's training, or omit the flag"
        )
    set_flag(args, "num_languages", len(tags))
    return tags
