"""What ``config.json`` may say: numbers, truth values, short names, and nothing that names a file or a command.

A setting that is not known here is refused, whatever it is. Settings of training, and those that name files (pretrained
embeddings), are left out when a model is packaged.
"""

import argparse
import os
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime.records import (
    LARGEST_NUMBER,
    SEARCH,
    STEPS,
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
LEFT_OUT = (
    *("encoder_embed_path", "decoder_embed_path", "encoder_xformers_att_config", "decoder_xformers_att_config"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "checkpoint_activations", "offload_activations"),
    *("min_params_to_wrap", "log_depth_interval", "compile", "fast_dropout", "export"),
    *("init_from", "allow_other_dictionary"),
)
"""Flags of the model that are about files, parts of it, or training."""

_line = text(r"[^\x00-\x1f\x7f]{0,200}", "one line of text")
_positions = whole(1, LARGEST_NUMBER)
_option = text(r"[\w.,+ \[\]-]{0,100}", "a short text")
_size = whole(-1, LARGEST_NUMBER)

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
        raise PackageError(f"{path}: of version {str(config.get('version'))[:20]}, and this program reads {VERSION}")
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
    check(config, CONTENT)
    for name in (*config["tied"], *config["made_with"]):
        if not _line(name):
            raise ValueError(f"a name is not one line of text ({name[:60]!r})")
    known = model_settings(config["arch"])
    for key, value in config["model"].items():
        if key not in known:
            raise ValueError(f"model has the unknown setting {key[:60]!r}")
        check_setting(known[key], value)


def model_settings(arch: str) -> dict[str, argparse.Action]:
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
        right = truth(value)
    elif action.type is int:
        right = _size(value)
    elif action.type is float:
        right = is_number(value)
    elif action.choices is not None:
        right = isinstance(value, str) and value in action.choices
    else:
        right = all(_option(item) or is_number(item) and abs(item) <= LARGEST_NUMBER for item in items)
    if not right:
        raise ValueError(f"{action.dest} cannot be {repr(value)[:60]}")
