"""What ``config.json`` may say: numbers, truth values, short names, and nothing that names a file or a command.

A setting that is not known here is refused, whatever it is. Settings of training, and those that name files (pretrained
embeddings), are left out when a model is packaged.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

from fairseq_deep.core import alignment, description
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

from .folder import CODES, CONFIG, PackageError, read_text, verify_checksums

FORMAT, VERSION = "fairseq_deep package", 1
NEWER = "install a newer fairseq_deep"

_line = text(r"[^\x00-\x1f\x7f]{0,200}", "one line of text")
_positions = whole(1, LARGEST_NUMBER)
_size = whole(-1, LARGEST_NUMBER)
_share = number(0, 1)
_number = Check("a number", is_number)
_option = Check(
    "a short text or a number",
    lambda value: is_number(value) and abs(value) <= LARGEST_NUMBER or text(r"[\w.,+ \[\]-]{0,100}", "")(value),
)
_unsupported = Check("null or false: only fairseq supports it", lambda value: not value)

STACK = {
    **{name: _size for name in ("embed_dim", "ffn_embed_dim", "layers", "attention_heads")},
    **{name: truth for name in ("normalize_before", "learned_pos")},
    "layerdrop": _share,
}
FAIRSEQ = {
    **{f"{side}_{name}": check for side in ("encoder", "decoder") for name, check in STACK.items()},
    **{name: _share for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout")},
    **{name: _positions for name in ("max_source_positions", "max_target_positions")},
    **{name: truth for name in ("share_decoder_input_output_embed", "share_all_embeddings", "layernorm_embedding",
                                "no_token_positional_embeddings", "no_scale_embedding", "no_cross_attention",
                                "no_decoder_final_norm")},
    "activation_fn": one_of("relu", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear"),
    "decoder_output_dim": _size,
    **{name: _number for name in ("adaptive_softmax_dropout", "adaptive_softmax_factor", "quant_noise_pq_block_size",
                                  "quant_noise_scalar", "base_sublayers", "base_shuffle")},
    **{name: _unsupported for name in ("adaptive_input", "adaptive_softmax_cutoff", "tie_adaptive_weights",
                                       "tie_adaptive_proj", "quant_noise_pq", "char_inputs", "base_layers",
                                       "cross_self_attention")},
}  # fmt: skip
"""Flags of fairseq's Transformer that a package may have, with their checks."""

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
        "arch": text(r"\w{1,100}", "the name of an architecture"),
        "task": TASK,
        "text": exactly({**STEPS, "sub_words": optional(one_of(*CODES))}),
        "search": exactly(SEARCH),
        "criterion": exactly({"label_smoothing": number(0, 1)}),
        "model": {},
        "tied": {"*": text(r"[\w.]{1,200}", "the name of a tensor")},
        "made_with": {"*": _line},
    }
)
"""The schema of ``config.json``. The settings of ``model`` are those of its architecture."""

HUGGINGFACE = {"model_type": "fairseq_deep", "architectures": ["FairseqDeepForConditionalGeneration"]}
"""What transformers looks for in ``config.json``; older packages do not have it."""

LATER = {"max_len_a": 1.0, "max_len_b": 50}
"""Settings of the search that the first packages lack, and what they were translated with."""


def read_config(folder: str) -> dict[str, Any]:
    """The configuration in *folder*.

    Raises:
        PackageError: it is damaged, no JSON, or says what it may not say
    """
    verify_checksums(folder, [CONFIG])
    path, content = os.path.join(folder, CONFIG), read_text(folder, CONFIG)
    try:
        config = parse(content)
    except ValueError as error:
        raise PackageError(f"{path}: no configuration of a packaged model ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise PackageError(f"{path}: no configuration of a packaged model (its format is not {FORMAT!r})")
    if config.get("version") != VERSION:
        version = str(config.get("version"))[:20]
        raise PackageError(f"{path}: has format version {version}, but only {VERSION} is supported; {NEWER}")
    if isinstance(config.get("search"), dict):
        config["search"] = {**LATER, **config["search"]}
    try:
        check_config(config)
    except ValueError as error:
        raise PackageError(f"{path}: refused, because {error}") from error
    return config


def check_config(config: dict[str, Any]) -> None:
    """Refuse a configuration that is not whole, or says more than it may.

    Raises:
        ValueError: what is wrong, in words
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


@functools.cache
def model_settings() -> dict[str, Check]:
    """The flags of a model that a package may have, with their checks: fairseq's, and those of the methods."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    description.add_args(parser)
    alignment.add_args(parser)
    return {name: optional(each) for name, each in FAIRSEQ.items()} | {
        action.dest: optional(_check_of(action)) for action in parser._actions
    }


def _check_of(action: argparse.Action) -> Check:
    """The check of a flag's values."""
    registry = getattr(action.type, "__self__", None)  # of a flag that chooses a method
    if registry is not None:
        names = registry.names()
        return Check(f"a method of this version ({registry.kind} {', '.join(names)}); {NEWER}", names.__contains__)
    if action.choices is not None:
        return one_of(*action.choices)
    if action.nargs == 0:
        return truth
    plain = {int: _size, float: _number}.get(action.type, _option)
    return Check(plain.expected, lambda value: all(map(plain, value)) if _is_list(value) else plain(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 100
