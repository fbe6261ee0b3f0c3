"""Engines of a :class:`~fairseq_deep.runtime.Translator`: they search with our models, CTranslate2 or transformers.

The format of a model decides its engine. Each engine has "name", "facts" (:class:`ModelFacts`), "languages", "device",
"models" (ours), "source" and "target" (dictionaries) and ``translate(batches, nbest)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError

from ..bundle import Bundle
from ..exported import CTRANSLATE2
from ..loading import check_ensemble, load_model

SUPPORTED = ("beam", "max_len_a", "max_len_b", "lenpen", "limit_each")
"""Search options that other programs support."""


def open_engine(
    bundles: Sequence[Bundle], options: SearchOptions, precision: str = "fp32", device: str = "cpu", parallel: int = 1
) -> Any:
    """Open the engine for one model or an ensemble.

    Args:
        precision: "fp32", "bf16" or "int8"
        device: torch device
        parallel: number of batches that may be translated at once

    Raises:
        UsageError: a model cannot be loaded, or its format does not support the request
    """
    other = next((bundle for bundle in bundles if bundle.program), None)
    if other is None:
        from .torch_engine import TorchEngine

        loaded = [load_model(bundle) for bundle in bundles]
        check_ensemble(loaded, bundles)
        return TorchEngine(loaded, options, precision, device)
    problem = _find_problem(options, precision, len(bundles))
    if problem:
        raise UsageError(f"{other.checkpoint} is a model of {other.program}, which does not support {problem}")
    if other.program == CTRANSLATE2:
        from .ct2_engine import Ct2Engine

        return Ct2Engine(other, options, parallel)
    from .transformers_engine import TransformersEngine

    return TransformersEngine(other, options, device)


def _find_problem(options: SearchOptions, precision: str, models: int) -> str:
    """Return the part of a request that other programs do not support, with a fix; "" if they support all."""
    if models > 1:
        return "ensembles: give the models that it was exported from"
    if precision != "fp32":
        return f"--decode-precision {precision}: omit it; the export decides the precision"
    if options.gnmt_lenpen:
        return "--gnmt-lenpen: omit it"
    for field in fields(SearchOptions):
        if field.name not in SUPPORTED and getattr(options, field.name) != field.default:
            return f"the search option {field.name}: omit it"
    return ""
