"""Schema of ``config.json``: numbers, truth values and short names; no setting can name a file or a command.

Unknown settings are rejected. A package does not store settings of training, or settings that name files (pretrained
embeddings).
"""

from __future__ import annotations

import argparse
from typing import Any

from fairseq_deep.core import alignment, description
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import (
    LARGEST_NUMBER,
    SEARCH,
    STEPS,
    Check,
    check,
    exactly,
    is_number,
    language,
    number,
    one_of,
    optional,
    parse,
    text,
    truth,
    whole,
)

from .folder import CODES, CONFIG, Folder

FORMAT, VERSION = "fairseq_deep package", 1
NEWER = "install a newer fairseq_deep, or the plugin that has it"

_line = text(r"[^\x00-\x1f\x7f]{0,200}", "one line of text")
_positions = whole(1, LARGEST_NUMBER)
_option = Check(
    "a short text or a number",
    lambda value: value is None or isinstance(value, bool) or is_number(value) and abs(value) <= LARGEST_NUMBER
    or text(r"[\w.,+ \[\]-]{0,100}", "")(value) or isinstance(value, list) and len(value) <= 100
    and all(map(_option, value)),
)  # fmt: skip
"""A flag of the model; its type and range are checked when the model is described."""

FAIRSEQ = (
    *(f"{side}_{name}" for side in ("encoder", "decoder") for name in (
        "embed_dim", "ffn_embed_dim", "layers", "attention_heads", "normalize_before", "learned_pos", "layerdrop")),
    "dropout", "attention_dropout", "activation_dropout", "relu_dropout", "max_source_positions",
    "max_target_positions", "share_decoder_input_output_embed", "share_all_embeddings", "layernorm_embedding",
    "no_token_positional_embeddings", "no_scale_embedding", "no_cross_attention", "no_decoder_final_norm",
    "activation_fn", "decoder_output_dim", "adaptive_softmax_dropout", "adaptive_softmax_factor",
    "quant_noise_pq_block_size", "quant_noise_scalar", "base_sublayers", "base_shuffle", "adaptive_input",
    "adaptive_softmax_cutoff", "tie_adaptive_weights", "tie_adaptive_proj", "quant_noise_pq", "char_inputs",
    "base_layers", "cross_self_attention",
)  # fmt: skip
"""Flags of fairseq's Transformer that a package may contain."""

TASK = exactly(
    {
        "source_lang": language,
        "target_lang": language,
        "left_pad_source": truth,
        "left_pad_target": truth,
        "max_source_positions": _positions,
        "max_target_positions": _positions,
        "truncate_source": truth,
    }
)
CONTENT = exactly(
    {
        "format": one_of(FORMAT),
        "version": whole(VERSION, VERSION),
        "name": _line,
        "licence": _line,
        "arch": text(r"[A-Za-z0-9_]{0,50}transformer[A-Za-z0-9_]{0,50}", "the name of a Transformer's architecture"),
        "task": TASK,
        "text": exactly({**STEPS, "sub_words": optional(one_of(*CODES))}),
        "search": exactly(SEARCH),
        "criterion": exactly({"label_smoothing": number(0, 1)}),
        "model": {},
        "tied": {"*": text(r"[\w.]{1,200}", "the name of a tensor")},
        "made_with": {"*": _line},
    }
)
"""The schema of ``config.json``; :func:`model_settings` has the schema of ``model``."""

HUGGINGFACE = {"model_type": "fairseq_deep", "architectures": ["FairseqDeepForConditionalGeneration"]}
"""Settings in ``config.json`` that transformers requires; older packages do not have them."""

LATER = {"max_len_a": 1.0, "max_len_b": 50}
"""Search settings that the first packages lack, with the values used at that time."""


def read_config(folder: Folder) -> dict[str, Any]:
    """Read the configuration in *folder*.

    Raises:
        UsageError: the file is corrupt, not JSON, or has an invalid setting
    """
    path, content = folder.verified(CONFIG), folder.read_text(CONFIG)
    try:
        config = parse(content)
    except ValueError as error:
        raise UsageError(f"{path}: not a packaged-model configuration ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UsageError(f"{path}: not a packaged-model configuration (its format must be {FORMAT!r})")
    if config.get("version") != VERSION:
        version = str(config.get("version"))[:20]
        raise UsageError(f"{path}: has format version {version}, but only {VERSION} is supported; {NEWER}")
    if isinstance(config.get("search"), dict):
        config["search"] = {**LATER, **config["search"]}
    try:
        check_config(config)
    except ValueError as error:
        raise UsageError(f"{path}: rejected: {error}") from error
    return config


def check_config(config: dict[str, Any]) -> None:
    """Reject a configuration with missing, unknown or invalid settings.

    Raises:
        ValueError: with a message for the user
    """
    for key, value in HUGGINGFACE.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} must be {value} or missing")
    check({key: value for key, value in config.items() if key not in HUGGINGFACE}, CONTENT)
    for name in (*config["tied"], *config["made_with"]):
        if not _line(name):
            raise ValueError(f"a name is not one line of text ({name[:60]!r})")
    known = model_settings()
    for key in config["model"]:
        if key not in known:
            raise ValueError(f"model has the unknown setting {key[:60]!r}; if it is a new one, {NEWER}")
    check(config["model"], known, "model")


def model_settings() -> dict[str, Check]:
    """Return the model flags that a package may contain, fairseq's and this package's, with their checks."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    description.add_args(parser)
    alignment.add_args(parser)
    known = {**dict.fromkeys(FAIRSEQ, _option), **{action.dest: _check_of(action) for action in parser._actions}}
    return {**known, **dict.fromkeys(("encoder_layers", "decoder_layers"), optional(whole(0, LARGEST_NUMBER)))}


def _check_of(action: argparse.Action) -> Check:
    """Return the check of a flag's values."""
    registry = getattr(action.type, "__self__", None)  # set if the flag selects a method
    if registry is None:
        return _option
    names = registry.names()
    return optional(
        Check(f"a method of this version ({registry.kind} {', '.join(names)}); {NEWER}", names.__contains__)
    )
