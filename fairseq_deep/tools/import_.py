"""convert a transformers (Hugging Face) model to a checkpoint with dictionaries

M2M100, FSMT, Bart, MBart and Blenderbot have the layers of fairseq's Transformer. fairseq-train continues from the
checkpoint (--restore-file, --finetune-from-model, --init-from), and fairseq-deep translate and package read it.
"""

import argparse
import contextlib
import functools
import json
import os
from types import SimpleNamespace
from typing import Any

import torch

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime.engines.transformers_engine import check_package, log_probabilities, quiet
from fairseq_deep.runtime.model import StoredModel, build_model
from fairseq_deep.runtime.verification import Limits, Reference, compare
from fairseq_deep.tools import huggingface_import
from fairseq_deep.tools.checkpoints import check_fairseq, save_checkpoint
from fairseq_deep.tools.huggingface_format import TOLERANCE
from fairseq_deep.tools.output_files import check_outputs, replacing

EXAMPLE = "fairseq-deep import model.hf --from huggingface --output start/model.pt"
FORMATS = ("huggingface",)
SIZES = (5, 9, 3, 12)
"""Lengths of the random sentences for the comparison of models, in tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory, the checkpoint, and settings that the directory may lack."""
    parser.add_argument("folder", metavar="FOLDER", help="directory with config.json, weights and tokenizer files")
    parser.add_argument("--from", dest="format", choices=FORMATS, required=True, help="format of the directory")
    text = "checkpoint to write; its dictionaries and codes are written next to it"
    parser.add_argument("--output", required=True, metavar="PATH", help=text)
    parser.add_argument("-s", "--source-lang", metavar="SRC", help="source language (default: as in config.json)")
    parser.add_argument("-t", "--target-lang", metavar="TGT", help="target language (default: as in config.json)")
    parser.add_argument("--tokenizer", choices=("moses", "none"),
                        help="tokenizer of raw text (default: moses; none with SentencePiece)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert the model, compare its scores with the original's, and write the checkpoint."""
    check_fairseq()
    check_outputs([args.output], [args.folder])
    check_package()
    if not os.path.isdir(args.folder):
        raise UsageError(f"{args.folder}: no such directory; give one with config.json and weights")
    huggingface_import.check_kind(args.folder)
    found = huggingface_import.read_vocabularies(args.folder)
    with quiet():
        stored, source, target, difference = load(args.folder, found)
    languages = _languages(args, stored.task["langs"])
    steps = {"tokenizer": args.tokenizer or ("none" if found.pieces else "moses"), "lowercase": False}
    sides = zip(languages, (source, target))
    files = {f"dict.{language}.txt": "".join(f"{word} 1\n" for word in each.symbols[4:]).encode()
             for language, each in sides}  # fmt: skip
    files |= {"steps.json": f"{json.dumps(steps)}\n".encode(), **found.subwords}
    paths = {os.path.join(os.path.dirname(args.output), name): content for name, content in files.items()}
    for path in filter(os.path.lexists, paths):
        raise UsageError(f"cannot write {path}: it exists; give --output in another directory")
    with contextlib.ExitStack() as temporaries:  # they get their names after the checkpoint was written
        for path, content in paths.items():
            with open(temporaries.enter_context(replacing(path)), "wb") as stream:
                stream.write(content)
        _write_checkpoint(args.output, stored, languages, (source, target))
    sizes = f"{languages[0]} {len(source):,}, {languages[1]} {len(target):,} entries"
    print(f"{args.folder} -> {args.output}: {sizes}; log-probabilities within {difference:.1e}")
    return 0


def load(folder: str, found: Any) -> tuple[Any, Any, Any, float]:
    """Return the converted model, its dictionaries, and the maximum difference of
    log-probabilities.

    Args:
        found: see `huggingface_import.read_vocabularies`

    Raises:
        UsageError: the model cannot be loaded, or the log-probabilities differ
    """
    from transformers import AutoModelForSeq2SeqLM

    try:
        other = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    except Exception as error:  # corrupt files raise any exception
        raise UsageError(f"{folder}: transformers cannot load it ({one_line(error)})") from error
    state = {name: value.detach() for name, value in other.state_dict().items()}
    flags = huggingface_import.make_flags(other.config, state)
    tensors = huggingface_import.make_tensors(state, other.config.model_type, flags)
    bias = state.get("final_logits_bias")
    source, target = huggingface_import.cut_tables(tensors, bias, found, flags, folder)
    generation = other.generation_config
    task = {"langs": getattr(other.config, "langs", None), "beam": generation.num_beams or 4,
            "lenpen": 1.0 if generation.length_penalty is None else generation.length_penalty}  # fmt: skip
    stored = StoredModel(flags, tensors, task)
    model = build_model(stored, source, target)
    draws = torch.Generator().manual_seed(1)
    lengths = [min(length, flags.max_source_positions) for length in SIZES]
    rows = [torch.cat([torch.randint(4, len(source), (length - 1,), generator=draws), torch.tensor([2])])
            for length in lengths]  # fmt: skip
    options = SearchOptions(beam=1, max_len_a=0, max_len_b=min(max(SIZES), flags.max_target_positions) - 1)
    theirs = SimpleNamespace(log_probabilities=functools.partial(log_probabilities, other))
    report = compare("transformers", Reference(model, options), theirs, rows, Limits(TOLERANCE), real=False)
    stored.tensors = model.state_dict()
    return stored, source, target, report.difference


def _languages(args: argparse.Namespace, found: Any) -> tuple[str, str]:
    named = found if isinstance(found, (list, tuple)) and len(found) == 2 else (None, None)
    pair = tuple(given or name for given, name in zip((args.source_lang, args.target_lang), named))
    if not all(isinstance(name, str) and name.replace("_", "").replace("-", "").isalnum() for name in pair):
        raise UsageError(f"{args.folder} does not name its languages: give --source-lang and --target-lang")
    if pair[0] == pair[1]:
        raise UsageError(f"both languages are {pair[0]}: give two with --source-lang and --target-lang")
    return pair


def _write_checkpoint(output: str, stored: Any, languages: tuple[str, str], dictionaries: Any) -> None:
    from fairseq_deep.plugin.stored import make_state

    task = {"source_lang": languages[0], "target_lang": languages[1]}
    search = {name: stored.task[name] for name in ("beam", "lenpen")}
    folder = os.path.dirname(os.path.abspath(output))
    save_checkpoint(make_state(stored, dictionaries, folder, {"task": task, "search": search}), output)
