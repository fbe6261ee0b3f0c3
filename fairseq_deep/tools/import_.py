"""convert a transformers (Hugging Face) model to a checkpoint with dictionaries

M2M100, FSMT, Bart, MBart and Blenderbot have the layers of fairseq's Transformer. fairseq-train continues from the
checkpoint (--restore-file, --finetune-from-model, --init-from), and fairseq-deep translate and package read it.
"""

import argparse
import os
import shutil
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.checkpoints import check_fairseq, save_checkpoint
from fairseq_deep.tools.output_files import check_outputs, write_text

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
    """Convert the model, compare its logits with the original's, and write the checkpoint."""
    from fairseq_deep.tools import huggingface_export, huggingface_import

    check_fairseq()
    check_outputs([args.output], [args.folder])
    huggingface_export.check_package()
    if not os.path.isdir(args.folder):
        raise UsageError(f"{args.folder}: no such directory; give one with config.json and weights")
    huggingface_import.check_kind(args.folder)
    found = huggingface_import.read_vocabularies(args.folder)
    with huggingface_export.quiet():
        stored, source, target, difference = load(args.folder, found)
    languages = _languages(args, stored.task["langs"])
    tokenizer = args.tokenizer or ("none" if found.pieces else "moses")
    files = _companions(args.output, languages, found)
    for path in files:
        if os.path.lexists(path):
            raise UsageError(f"cannot write {path}: it exists; give --output in another directory")
    try:
        _write(args.output, stored, languages, (source, target), tokenizer, found)
    except BaseException:
        for path in filter(os.path.exists, files):
            os.remove(path)
        raise
    sizes = f"{languages[0]} {len(source):,}, {languages[1]} {len(target):,} entries"
    print(f"{args.folder} -> {args.output}: {sizes}; logits within {difference:.1e}")
    return 0


def load(folder: str, found: Any) -> tuple[Any, Any, Any, float]:
    """Return the converted model, its dictionaries, and the maximum difference of logits.

    Args:
        found: see `huggingface_import.read_vocabularies`

    Raises:
        UsageError: the model cannot be loaded, or the logits differ
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from fairseq_deep.errors import one_line
    from fairseq_deep.runtime.model import StoredModel, build_model
    from fairseq_deep.runtime.verification import Limits, Side, compare
    from fairseq_deep.tools import huggingface_import
    from fairseq_deep.tools.huggingface_export import TOLERANCE, Sentence, our_logits, their_logits

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
    sources, targets = (_random(len(each), flags.max_source_positions, draws) for each in (source, target))
    given = {tuple(row): wanted for row, wanted in zip(sources, targets)}

    def translate(batch: list[Sentence]) -> list[list[int]]:
        return [given[tuple(each.plain)] for each in batch]

    sides = Side(translate, our_logits(model)), Side(translate, their_logits(other, len(target)))
    sentences = [Sentence(row, row) for row in sources]
    report = compare("transformers", "logits", *sides, sentences, Limits(TOLERANCE), real=False)
    stored.tensors = model.state_dict()
    return stored, source, target, report.difference


def _random(size: int, longest: int, draws: Any) -> list[list[int]]:
    """Return sentences of random entries of a dictionary with *size* entries."""
    import torch

    lengths = [min(length, longest) for length in SIZES]
    return [[*torch.randint(4, size, (length - 1,), generator=draws).tolist(), 2] for length in lengths]


def _languages(args: argparse.Namespace, found: Any) -> tuple[str, str]:
    named = found if isinstance(found, (list, tuple)) and len(found) == 2 else (None, None)
    pair = tuple(given or name for given, name in zip((args.source_lang, args.target_lang), named))
    if not all(isinstance(name, str) and name.replace("_", "").replace("-", "").isalnum() for name in pair):
        raise UsageError(f"{args.folder} does not name its languages: give --source-lang and --target-lang")
    if pair[0] == pair[1]:
        raise UsageError(f"both languages are {pair[0]}: give two with --source-lang and --target-lang")
    return pair


def _companions(output: str, languages: tuple[str, str], found: Any) -> list[str]:
    """Return the files next to the checkpoint: dictionaries, text steps, and sub-words if used."""
    names = [f"dict.{language}.txt" for language in languages] + ["steps.json"]
    names += ["code"] * (found.codes is not None) + ["spm.model"] * (found.pieces is not None)
    return [os.path.join(os.path.dirname(output), name) for name in names]


def _write(output: str, stored: Any, languages: tuple[str, str], dictionaries: Any, tokenizer: str, found: Any) -> None:
    """Write the dictionaries and sub-words, and then the checkpoint."""
    import json

    paths = _companions(output, languages, found)
    for path, dictionary in zip(paths, dictionaries):
        write_text(path, "".join(f"{word} 1\n" for word in dictionary.symbols[4:]))
    write_text(paths[2], json.dumps({"tokenizer": tokenizer, "lowercase": False}) + "\n")
    if found.codes is not None:
        write_text(paths[-1], found.codes)
    if found.pieces is not None:
        shutil.copyfile(found.pieces, paths[-1])
    from fairseq_deep.plugin.stored import make_state

    task = {"source_lang": languages[0], "target_lang": languages[1]}
    search = {name: stored.task[name] for name in ("beam", "lenpen")}
    folder = os.path.dirname(os.path.abspath(output))
    save_checkpoint(make_state(stored, dictionaries, folder, {"task": task, "search": search}), output)
