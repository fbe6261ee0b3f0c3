"""A packaged model as the checkpoint that fairseq's commands expect.

Nothing in the folder is run, and no other file is read. Sums, settings, names, shapes and types of all tensors are
checked before anything is made of them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import re
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from torch import Tensor

from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.plugin.models.checkpoints import state_differences
from fairseq_deep.plugin.models.dictionaries import KEY, sums
from fairseq_deep.runtime.records import parse

from .config import read_config
from .folder import (
    CODES,
    CONFIG,
    WEIGHTS,
    PackageError,
    dictionary_name,
    folder_of,
    place,
    refuse_others,
    verify_checksums,
)

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
"""Types of tensors, as the format and as torch call them; I64 is that of fairseq's markers of a version."""
LARGEST_HEADER = 1 << 23
"""Bytes: 1,000 layers take some 4 million."""


def load(path: str) -> dict[str, Any]:
    """The checkpoint of the packaged model whose weights are at *path*.

    Returns:
        what a checkpoint of fairseq holds, without optimizer: "cfg", "model" (tied tensors are one), ...

    Raises:
        PackageError: the folder is damaged, or holds what it may not hold
    """
    folder = folder_of(path)
    if os.path.basename(path) != WEIGHTS:
        raise PackageError(f"{path}: no packaged model; its weights are called {WEIGHTS}")
    config = read_config(folder)
    dictionaries = [dictionary_name(config["task"][f"{side}_lang"]) for side in ("source", "target")]
    codes = [name for name in (codes_of(config),) if name]
    refuse_others(folder, [*dictionaries, *codes])
    verify_checksums(folder, [*dictionaries, *codes, WEIGHTS])
    if config["text"]["sub_words"] == "subword-nmt":
        check_merges(folder, codes[0])
    check_header(place(folder, WEIGHTS))
    tensors = read_tensors(place(folder, WEIGHTS))
    for name, owner in config["tied"].items():
        if name in tensors or owner not in tensors:
            raise PackageError(f"{os.path.join(folder, CONFIG)}: refused, because {name} cannot be tied to {owner}")
    tensors.update({name: tensors[owner] for name, owner in config["tied"].items()})
    source, target = (read_dictionary(folder, name) for name in dictionaries)
    task = types.SimpleNamespace(source_dictionary=source, target_dictionary=target)
    check_fit(folder, config, tensors, task)
    return {
        "args": None,
        "cfg": settings_of(folder, config),
        "model": tensors,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0},
        ],
        "task_state": {KEY: sums(task)},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }


def codes_of(config: dict[str, Any]) -> str | None:
    """The name of the file with the sub-words, if words are cut into any."""
    return CODES.get(config["text"]["sub_words"])


def check_merges(folder: str, name: str) -> None:
    """Refuse merges of subword-nmt that the library would end the program for.

    Raises:
        PackageError: with the number of the line
    """
    path = place(folder, name)
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(itertools.chain([stream.readline()], stream), 1):  # of an empty file "", too
                if number == 1 and line.startswith("#version:"):
                    right = re.fullmatch(r"#version: 0\.[12](\.0)*\s*", line)
                else:
                    right = len(line.strip("\r\n ").split(" ")) == 2
                if not right:
                    kind = "two sub-words, or on top #version: 0.2"
                    raise PackageError(f"{path}: line {number} must be {kind} ({line[:40]!r}); copy it again")
    except UnicodeDecodeError as error:
        raise PackageError(f"{path}: must be UTF-8 ({error.reason}); copy it again") from error


def odd_pieces(path: str) -> list[str]:
    """What is wrong with a model of SentencePiece; empty if it can be read.

    Raises:
        ImportError: the library is missing
    """
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        return [f"{path}: not a valid model of SentencePiece ({' '.join(str(error).split())[:100]})"]
    return []


def check_header(path: str) -> None:
    """Refuse what the library reads without a word: names that occur twice, and metadata without end.

    Raises:
        PackageError: the header is too large, or not what :func:`write` writes
    """
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        content = stream.read(min(size, LARGEST_HEADER + 1))
    if LARGEST_HEADER < size <= os.path.getsize(path):
        raise PackageError(f"{path}: refused, because its header has {size:,} bytes, more than {LARGEST_HEADER:,}")
    try:
        header = parse(content.decode())
    except ValueError as error:
        reason = " ".join(str(error).split())[:100]
        raise PackageError(f"{path}: no whole file of safetensors ({reason})") from error
    if isinstance(header, dict) and header.get("__metadata__") not in (None, {"format": "pt"}):
        raise PackageError(f"{path}: refused, because of its metadata; a package has none but its format")


def read_tensors(path: str) -> dict[str, Tensor]:
    """The tensors in the file, each with its own memory.

    Raises:
        PackageError: the file is damaged, or holds tensors of another type
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise PackageError(f"{path}: {error.name} is missing: pip install safetensors") from error
    tensors: dict[str, Tensor] = OrderedDict()
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                kind = opened.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise PackageError(f"{path}: refused, because {name[:60]!r} is of type {kind}")
                tensors[name] = opened.get_tensor(name).clone()
                if not torch.isfinite(tensors[name]).all():
                    raise PackageError(f"{path}: refused, because {name[:60]!r} holds NaN or Inf")
    except PackageError:
        raise
    except Exception as error:  # what the library raises of a damaged file is its own, and has no common type
        reason = " ".join(str(error).split())[:200]
        raise PackageError(f"{path}: no whole file of safetensors ({reason or type(error).__name__})") from error
    return tensors


def read_dictionary(folder: str, name: str) -> Dictionary:
    """fairseq's dictionary in the file *name*.

    Raises:
        PackageError: it is none
    """
    path = place(folder, name)
    try:
        return Dictionary.load(path)
    except Exception as error:  # fairseq raises nothing more special of a wrong encoding
        raise PackageError(f"{path}: no dictionary of fairseq ({' '.join(str(error).split())[:100]})") from error


def check_fit(folder: str, config: dict[str, Any], tensors: dict[str, Tensor], task: types.SimpleNamespace) -> None:
    """Refuse settings, tensors and dictionaries that do not belong together, with a model that takes no memory.

    Args:
        task: with both dictionaries

    Raises:
        PackageError: what differs
    """
    path = os.path.join(folder, CONFIG)
    for side in ("encoder", "decoder"):
        if (config["model"].get(f"{side}_layers") or 0) > len(tensors):
            raise PackageError(f"{path}: refused, because {WEIGHTS} has not that many {side}_layers")
    task.cfg = argparse.Namespace(load_alignments=False, **config["task"])
    try:
        with skip_initialisation(), quiet():
            model = ARCH_MODEL_REGISTRY[config["arch"]].build_model(flags_of(config), task)
            differences = state_differences(model.state_dict(), tensors)
    except Exception as error:  # whatever settings set off in fairseq and torch, and our own refusals
        reason = " ".join(str(error).split())[:200]
        raise PackageError(f"{path}: refused, no model can be built of it ({reason})") from error
    if differences:
        where = f"{os.path.join(folder, WEIGHTS)}: does not fit {CONFIG} and the dictionaries"
        raise PackageError(f"{where} ({differences[0]}; {len(differences)} differences)")


def flags_of(config: dict[str, Any]) -> argparse.Namespace:
    """The model's settings as fairseq hands them to ``build_model``."""
    flags = argparse.Namespace(_name=config["arch"], arch=config["arch"], **config["model"])
    ARCH_CONFIG_REGISTRY[config["arch"]](flags)
    return flags


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is built in here says nothing: it is built again by whoever asked for the checkpoint."""
    logger = logging.getLogger("fairseq_deep")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def settings_of(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint: raw text goes in and comes out where fairseq's hub prepares it."""
    folder, task, text = os.path.abspath(folder), config["task"], config["text"]
    moses = {"_name": "moses", "moses_no_dash_splits": True, "moses_no_escape": False}
    languages = {name: task[name] for name in ("source_lang", "target_lang")}
    codes = os.path.join(folder, codes_of(config) or "")
    sub_words = {
        "subword-nmt": {"_name": "subword_nmt", "bpe_codes": codes, "bpe_separator": "@@"},
        "sentencepiece": {"_name": "sentencepiece", "sentencepiece_model": codes},
        None: None,
    }
    search = dict(config["search"])
    gnmt_lenpen = search.pop("gnmt_lenpen")
    criterion = {"_name": "adaptive_loss", "sentence_avg": False}
    if not config["model"].get("adaptive_softmax_cutoff"):
        criterion = {"_name": "label_smoothed_cross_entropy", "sentence_avg": False, "report_accuracy": False,
                     "ignore_prefix_size": 0, **config["criterion"]}  # fmt: skip
    return {
        "_name": None,
        "model": flags_of(config),
        "task": {"_name": "deep_translation", "data": folder, "dataset_impl": None, "train_subset": "train",
                 "required_seq_len_multiple": 1, "gnmt_lenpen": gnmt_lenpen, **task},
        "dataset": {"max_tokens": 4000, "batch_size": 64},
        "criterion": criterion,
        "generation": dataclasses.asdict(GenerationConfig(**search)),
        "tokenizer": {**moses, **languages} if text["tokenizer"] == "moses" else None,
        "bpe": sub_words[text["sub_words"]],
    }  # fmt: skip
