"""What ``config.json`` may say: numbers, truth values, short names, and nothing that names a file or a command.

A setting that is not known here is refused, whatever it is. Settings of training, and those that name files (pretrained
embeddings), are left out when a model is packaged.
"""

import argparse
import json
import math
import os
import re
from typing import Any, Callable, Dict, List, NoReturn, Tuple

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from ..models.deep_transformer import DeepTransformerModel
from .folder import CODES, CONFIG, PackageError, check_sums, read_text

FORMAT, VERSION = "fairseq_deep package", 1
TOKENIZERS = ("moses", "none")
LARGEST_NUMBER = 1_000_000
"""No size, position or depth of a model is above it."""
LEFT_OUT = (
    *("encoder_embed_path", "decoder_embed_path", "encoder_xformers_att_config", "decoder_xformers_att_config"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "checkpoint_activations", "offload_activations"),
    *("min_params_to_wrap", "log_depth_interval", "compile", "fast_dropout", "export"),
    *("init_from", "allow_other_dictionary"),
)
"""Flags of the model that are about files, parts of it, or training."""

Check = Callable[[Any], bool]


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _sub_words(value: Any) -> bool:
    return value is None or isinstance(value, str) and value in CODES


def _text(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _whole(least: int, most: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(least: float, most: float) -> Check:
    return lambda value: _is_number(value) and least <= value <= most


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 53
    return isinstance(value, float) and math.isfinite(value)


_line = _text(r"[^\x00-\x1f\x7f]{0,200}")
_language = _text(r"[A-Za-z0-9_.-]{1,32}")
_positions = _whole(1, LARGEST_NUMBER)
_option = _text(r"[\w.,+ \[\]-]{0,100}")

TOP: Dict[str, Check] = {
    "format": lambda value: value == FORMAT,
    "version": _whole(VERSION, VERSION),
    "name": _line,
    "licence": _line,
    "arch": _text(r"\w{1,100}"),
    **{section: lambda value: isinstance(value, dict) for section in ("model", "tied", "made_with")},
}
SECTIONS: Dict[str, Dict[str, Check]] = {
    "task": {
        "source_lang": _language,
        "target_lang": _language,
        "left_pad_source": _truth,
        "left_pad_target": _truth,
        "max_source_positions": _positions,
        "max_target_positions": _positions,
        "truncate_source": _truth,
    },
    "text": {"tokenizer": lambda value: value in TOKENIZERS, "lowercase": _truth, "sub_words": _sub_words},
    "search": {
        "beam": _whole(1, 1000),
        "lenpen": _number(0, 100),
        "gnmt_lenpen": _truth,
        "max_len_a": _number(0, 100),
        "max_len_b": _whole(1, LARGEST_NUMBER),
    },
    "criterion": {"label_smoothing": _number(0, 1)},
}

LATER = {"max_len_a": 1.0, "max_len_b": 50}
"""Settings of the search that the first packages lack, and what they were translated with."""


def read_config(folder: str) -> Dict[str, Any]:
    """The configuration in *folder*.

    Raises:
        PackageError: it is damaged, no JSON, or says what it may not say
    """
    check_sums(folder, [CONFIG])
    path, text = os.path.join(folder, CONFIG), read_text(folder, CONFIG)
    try:
        config = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path}: no configuration of a packaged model ({str(error)[:100]})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise PackageError(f"{path}: no configuration of a packaged model (its format is not {FORMAT!r})")
    if config.get("version") != VERSION:
        raise PackageError(f"{path}: of version {str(config.get('version'))[:20]}, and this program reads {VERSION}")
    if isinstance(config.get("search"), dict):
        config["search"] = {**LATER, **config["search"]}
    try:
        check_config(config)
    except ValueError as error:
        raise PackageError(f"{path}: refused, because {error}") from error
    return config


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """An object of JSON whose names differ.

    Raises:
        ValueError: they do not
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def check_config(config: Dict[str, Any]) -> None:
    """Refuse a configuration that is not whole, or says more than it may.

    Raises:
        ValueError: what is wrong, in words
    """
    _check("it", {key: value for key, value in config.items() if key not in SECTIONS}, TOP)
    for name, checks in SECTIONS.items():
        if not isinstance(config.get(name), dict):
            raise ValueError(f"it has no section {name}")
        _check(name, config[name], checks)
    for section, checks in (("tied", _text(r"[\w.]{1,200}")), ("made_with", _line)):
        _check(section, config[section], {key: checks for key in config[section] if _line(key)})
    known = model_settings(config["arch"])
    for key, value in config["model"].items():
        if key not in known:
            raise ValueError(f"model has the unknown setting {key[:60]!r}")
        check_setting(known[key], value)


def _check(section: str, content: Dict[str, Any], checks: Dict[str, Check]) -> None:
    for key in checks:
        if key not in content:
            raise ValueError(f"{section} lacks {key}")
    for key, value in content.items():
        if key not in checks:
            raise ValueError(f"{section} has the unknown setting {key[:60]!r}")
        if not checks[key](value):
            raise ValueError(f"{key} cannot be {repr(value)[:60]}")


def model_settings(arch: str) -> Dict[str, argparse.Action]:
    """The settings that a packaged model of the architecture may have, with what the command line takes for them.

    Raises:
        ValueError: it is neither an architecture of this package nor one of fairseq's ``transformer``
    """
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model not in (DeepTransformerModel, TransformerModel):
        raise ValueError(f"{arch} is neither an architecture of this package nor one of fairseq's transformer")
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    model.add_args(parser)
    return {action.dest: action for action in parser._actions if action.dest not in LEFT_OUT}


def check_setting(action: argparse.Action, value: Any) -> None:
    """Refuse a value that the flag cannot have.

    Raises:
        ValueError: with the setting and the value
    """
    if value is None:
        return
    items = value if isinstance(value, list) and len(value) <= 100 else [value]
    if action.nargs == 0:
        right = _truth(value)
    elif action.type is int:
        right = _size(value)
    elif action.type is float:
        right = _is_number(value)
    elif action.choices is not None:
        right = isinstance(value, str) and value in action.choices
    else:
        right = all(_option(item) or _is_number(item) and abs(item) <= LARGEST_NUMBER for item in items)
    if not right:
        raise ValueError(f"{action.dest} cannot be {repr(value)[:60]}")


_size = _whole(-1, LARGEST_NUMBER)
