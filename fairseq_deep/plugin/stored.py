"""Conversion of stored models: checkpoints for the runtime, packages for fairseq's commands."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.dictionary import Dictionary, hash_symbols
from fairseq_deep.runtime.model import READERS, StoredModel

from .compat import register_format
from .models.dictionaries import KEY, LANGUAGES
from .models.hydra import fill

_POSITIONS = ("max_source_positions", "max_target_positions")


def read_checkpoint(path: str) -> StoredModel:
    """Load a checkpoint of this package or of fairseq's ``transformer``.

    Raises:
        UsageError: the file cannot be loaded, or has another model
    """
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
    except Exception as error:  # a corrupt or rejected file raises any exception
        raise UsageError(f"cannot load {path}: {one_line(error)}") from error
    config, weights = (state.get(name) if isinstance(state, dict) else None for name in ("cfg", "model"))
    given, task = _settings(config, "model"), _settings(config, "task")
    if not (given and task and isinstance(weights, dict) and weights):
        raise UsageError(f"{path} is not a checkpoint of fairseq")
    flags, arch = fill(given, path), given.get("arch") or given.get("_name")
    flags.encoder_embed_path = flags.decoder_embed_path = None  # the checkpoint contains these embeddings
    hashes, smoothing = _settings(state, "task_state").get(KEY), _settings(config, "criterion").get("label_smoothing")
    stock = arch if flags.arch == f"deep_{arch}" else None
    return StoredModel(flags, weights, _task_settings(task), hashes, smoothing or 0.0, stock)


def _settings(parts: Any, name: str) -> dict[str, Any]:
    """Return a part of a configuration, which fairseq-hydra-train and fairseq-train store as different types."""
    part = parts.get(name) if isinstance(parts, dict) or OmegaConf.is_dict(parts) else None
    if OmegaConf.is_dict(part):
        return dict(OmegaConf.to_container(part))
    return part if isinstance(part, dict) else vars(part) if isinstance(part, argparse.Namespace) else {}


def _task_settings(found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of fairseq's translation task: *found*, completed with its defaults."""
    defaults = dataclasses.asdict(TranslationConfig())
    return {name: default if found.get(name) is None else found[name] for name, default in defaults.items()}


def as_checkpoint(path: str) -> dict[str, Any]:
    """Load the package with the weights at *path* in the form of a fairseq checkpoint.

    Raises:
        UsageError: the package is invalid
    """
    package, folder = packaged.load(path), os.path.abspath(packaged.folder_of(path))
    stored = package.stored
    configuration = _configuration(folder, package.config, fill(vars(package.flags), path))
    return _state(configuration, package.tensors, stored.hashes)


def make_state(stored: StoredModel, dictionaries: Sequence[Dictionary], folder: str, config: dict) -> dict[str, Any]:
    """Return a fairseq checkpoint for a model that was not trained with fairseq.

    Args:
        stored: the model's flags and weights
        dictionaries: source and target dictionary
        folder: the directory with the dictionaries
        config: settings "task" (the languages) and "search", as in a package
    """
    flags = fill(vars(stored.flags), folder)
    task = _task_settings({**config["task"], **{name: getattr(flags, name) for name in _POSITIONS}})
    unset = ("_name", "data", "dataset_impl", "train_subset", "required_seq_len_multiple", "gnmt_lenpen")
    content = {
        "task": {name: value for name, value in task.items() if name not in unset},
        "text": {"tokenizer": "none", "sub_words": None},  # a checkpoint may not name files
        "search": {**config["search"], "gnmt_lenpen": False},
        "criterion": {"label_smoothing": stored.label_smoothing},
    }
    hashes = {side: hash_symbols(each.symbols) for side, each in zip(("source", "target"), dictionaries)}
    return _state(_configuration(folder, content, flags), stored.tensors, hashes)


def _state(configuration: dict[str, Any], tensors: dict[str, Any], hashes: dict[str, str] | None) -> dict[str, Any]:
    """Return the content of a fairseq checkpoint, without optimizer state."""
    languages = [configuration["task"][f"{side}_lang"] for side in ("source", "target")]
    return {
        "args": None,
        "cfg": configuration,
        "model": tensors,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0},
        ],
        "task_state": {KEY: hashes, LANGUAGES: languages},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }


def _configuration(folder: str, config: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Return fairseq's configuration, including tokenizer and sub-words, so its hub accepts raw text."""
    task, text, search = config["task"], config["text"], dict(config["search"])
    gnmt_lenpen = search.pop("gnmt_lenpen")
    languages = {name: task[name] for name in ("source_lang", "target_lang")}
    moses = {"_name": "moses", "moses_no_dash_splits": True, "moses_no_escape": False, **languages}
    codes = os.path.join(folder, packaged.codes_of(config) or "")
    sub_words = {
        "subword-nmt": {"_name": "subword_nmt", "bpe_codes": codes, "bpe_separator": "@@"},
        "sentencepiece": {"_name": "sentencepiece", "sentencepiece_model": codes},
    }
    return {
        "_name": None,
        "model": flags,
        "task": {"_name": "deep_translation", "data": folder, "dataset_impl": None, "train_subset": "train",
                 "required_seq_len_multiple": 1, "gnmt_lenpen": gnmt_lenpen, **task},
        "dataset": {"max_tokens": 4000, "batch_size": 64},
        "criterion": {"_name": "label_smoothed_cross_entropy", "sentence_avg": False, "report_accuracy": False,
                      "ignore_prefix_size": 0, **config["criterion"]},
        "generation": dataclasses.asdict(GenerationConfig(**search)),
        "tokenizer": moses if text["tokenizer"] == "moses" else None,
        "bpe": sub_words.get(text["sub_words"]),
    }  # fmt: skip


READERS[""] = read_checkpoint
register_format(".safetensors", as_checkpoint)
