"""translate a training text with a teacher, for sequence-level distillation

Sequence-Level Knowledge Distillation, Kim and Rush, EMNLP 2016: a student is trained on the teacher's beam-search
output instead of the references (--choose best), or on the hypothesis in the beam with the highest sentence BLEU
against the reference (--choose nearest). The same command resumes after an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
from itertools import islice
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.engine import Engine
from fairseq_deep.recipes.text import corpus, distilled
from fairseq_deep.recipes.trainings import devices_of
from fairseq_deep.runtime.files import checksum
from fairseq_deep.tools import translate
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.machine import count_cores

EXAMPLE = "fairseq-deep distill exp/teacher --text DIR --output DISTILLED"

HEAD, MOST_UNKNOWN = 200, 0.3
"""Lines that show whether the text is in the teacher's source language, and their maximum share of unknown tokens."""
SHARDS, MOST_LINES = 64, 20000
"""Approximate number of shards, and maximum lines per shard, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the teacher, the text, the output and the search."""
    kinds = "teacher: directory of a recipe or of a packaged model, or checkpoint; several form an ensemble"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=kinds)
    parser.add_argument("--text", required=True, metavar="DIR", help="directory with train.SRC and train.TGT, or .gz")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory; other sets are copied to it")
    parser.add_argument(
        "--choose", choices=("best", "nearest"), default="best",
        help="choose the best hypothesis, or the nearest to the reference (default: best)",
    )  # fmt: skip
    workers = "number of simultaneous processes (default: one per GPU, or per core without a GPU)"
    parser.add_argument("--workers", type=at_least_one, metavar="N", help=workers)
    lost = f"lines per shard; an interruption loses at most one shard per process (default: 1/{SHARDS} of the text, "
    lost += f"rounded up to a multiple of {translate.CHUNK}, at most {MOST_LINES})"
    parser.add_argument("--shard-lines", type=at_least_one, metavar="N", help=lost)
    translate.add_search(parser, beam=5)
    translate.add_parts(parser)
    parser.set_defaults(resumes=True)


def run(args: argparse.Namespace) -> int:
    """Translate the missing shards and assemble the output directory."""
    output = os.path.normpath(args.output)
    if args.choose == "nearest" and args.beam == 1:
        raise UsageError("--choose nearest requires several hypotheses: choose a --beam above 1")
    bundles = [translate.find_parts(path, args) for path in args.models]
    langs = _languages(args, bundles[0])
    text = distilled.survey(args.text, langs)
    size = args.shard_lines or min(MOST_LINES, -(-text.lines // (SHARDS * translate.CHUNK)) * translate.CHUNK)
    job = distilled.Job(output, text, size, _settings(args, bundles, text))
    if job.is_finished():
        print(f"{output} is complete: {text.lines:,} pairs; nothing to do")
        return 0
    _check_language(bundles[0], langs, text)
    with Engine() as engine, job.begun(engine):
        missing = job.missing()
        if missing:
            asyncio.run(job.translate(engine, _words(args), missing, _environments(args, len(missing))))
        too_long = job.finish()
    note = f"; {too_long:,} too long for the teacher keep their reference" if too_long else ""
    print(f"{output}: {text.lines:,} pairs{note}")
    return 0


def _languages(args: argparse.Namespace, bundle: Any) -> tuple[str, str]:
    """Return the languages of the teacher; the training text must have both."""
    from fairseq_deep.runtime.loading import languages_of, read_model

    if not os.path.isdir(args.text):
        raise UsageError(f"--text {args.text}: no such directory; correct the path")
    source, target = languages_of(bundle, read_model(bundle).task)
    try:
        for lang in (source, target):
            corpus.find_text(args.text, f"train.{lang}")
    except UsageError as error:
        raise UsageError(f"the teacher translates {source} to {target}: {error}") from None
    return source, target


def _check_language(bundle: Any, langs: tuple[str, str], text: distilled.Text) -> None:
    """Reject a text with too many tokens outside of the teacher's dictionary."""
    from fairseq_deep.runtime.dictionary import Dictionary

    source = Dictionary.load(os.path.join(bundle.data, f"dict.{langs[0]}.txt"))
    steps = bundle.text_steps(*langs, source)
    tokens = [token for line in islice(corpus.read_lines(text.paths[0]), HEAD) for token in steps.prepare(line).split()]
    unknown = sum(token not in source.indices for token in tokens)
    if unknown > MOST_UNKNOWN * len(tokens):
        raise UsageError(f"the teacher's dictionary lacks {100 * unknown / len(tokens):.0f} % of the source tokens: "
                         "give text in its language, prepared for this model")  # fmt: skip


def _settings(args: argparse.Namespace, bundles: list, text: distilled.Text) -> dict[str, object]:
    """Return all settings that affect the result."""
    from fairseq_deep.runtime import search_of

    parts = [path for path in translate.parts_of(bundles) if os.path.isfile(path)]
    search = {**search_of(bundles[0]), "gnmt_lenpen": bundles[0].gnmt_lenpen}
    search.update({name: getattr(args, name) for name in translate.SEARCH if getattr(args, name) is not None})
    steps = [{name: value for name, value in dataclasses.asdict(bundle).items() if name in ("tokenizer", "lowercase")}
             for bundle in bundles]  # fmt: skip
    return {
        "teacher": sorted(checksum(path) for path in parts),
        "preparation of the text": steps,
        "text": [text.langs, text.lines, text.hashes],
        "search": {**search, "decode_precision": args.decode_precision},
        "--choose": args.choose,
    }


def _words(args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``translate``."""
    shared = argparse.ArgumentParser(add_help=False)
    translate.add_search(shared)
    translate.add_parts(shared)
    words = [*args.models, f"--nbest={args.beam if args.choose == 'nearest' else 1}"]
    for action in shared._actions:
        flag, value = action.option_strings[-1], getattr(args, action.dest)
        if value is not None and value is not False:
            words.append(flag if value is True else f"{flag}={value}")
    return words


def _environments(args: argparse.Namespace, shards: int) -> list[dict[str, str]]:
    """Return the variables of each process: its threads and, if there are GPUs, one of them."""
    import torch

    gpus = 0 if args.cpu else torch.cuda.device_count()
    count = min(args.workers or gpus or count_cores(), shards)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, count_cores() // count)))
    return [{"OMP_NUM_THREADS": threads, **({"CUDA_VISIBLE_DEVICES": device} if device else {})}
            for device in devices_of(count, min(gpus, 1), gpus)]  # fmt: skip
