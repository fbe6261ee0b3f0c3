"""Checks of fairseq's settings of generation, for its hub and for ``--eval-bleu-args``."""

from dataclasses import fields
from typing import Any

from fairseq.dataclass.configs import GenerationConfig

from fairseq_deep.core.fields import Range, check_fields
from fairseq_deep.core.registry import UsageError, nearest

LONGEST = 1_000_000
RANGES = {"beam": Range(1), "nbest": Range(1), "max_len_a": Range(0), "max_len_b": Range(0, LONGEST),
          "min_len": Range(0, LONGEST), "temperature": Range(1e-3), "no_repeat_ngram_size": Range(0),
          "prefix_size": Range(0)}  # fmt: skip


def check_settings(settings: dict[str, Any]) -> None:
    """Reject unknown settings, wrong types, values out of range, and limits of sampling without sampling.

    Raises:
        UsageError: the message names the setting
    """
    known = {field.name for field in fields(GenerationConfig)} - {"_name"}
    for name in settings:
        if name not in known:
            raise UsageError(f"unknown setting {name}{nearest(name, known)}; choose from {', '.join(sorted(known))}")
    check_fields(settings, GenerationConfig, RANGES)
    for name in ("sampling_topk", "sampling_topp"):
        if settings.get(name, -1) > 0 and not settings.get("sampling"):
            raise UsageError(f"{name} requires sampling; add sampling=True")
