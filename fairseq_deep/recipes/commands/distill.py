"""translate a training text with a teacher, for sequence-level distillation

Sequence-Level Knowledge Distillation, Kim and Rush, EMNLP 2016: a student is trained on the teacher's beam-search
output instead of the references (--choose best), or on the hypothesis in the beam with the highest sentence BLEU
against the reference (--choose nearest). The same command resumes after an interruption.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from itertools import islice

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.text import corpus, distilled
from fairseq_deep.recipes.text.teachers import Teachers
from fairseq_deep.runtime.files import checksum
from fairseq_deep.tools import translate
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.machine import count_cores

HEAD = 200
"""Lines that show whether the text is in the teacher's source language."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the teacher, the text, the output and the search."""
    kinds = "teacher: directory of a recipe or of a packaged model, or checkpoint; several form an ensemble"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=kinds)
    parser.add_argument("--text", required=True, metavar="DIR", help="directory with train.SRC and train.TGT, or .gz")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory; other sets are copied to it")
    parser.add_argument(
        "--choose", choices=distilled.CHOICES, default="best",
        help="choose the best hypothesis, or the nearest to the reference (default: best)",
    )  # fmt: skip
    workers = "number of processes (default: one per core; 1 with a GPU)"
    parser.add_argument("--workers", type=at_least_one, metavar="N", help=workers)
    lost = f"lines per shard; an interruption loses at most one shard per process (default: {translate.CHUNK})"
    parser.add_argument("--shard-lines", type=at_least_one, default=translate.CHUNK, metavar="N", help=lost)
    translate.add_search(parser, beam=5)
    translate.add_parts(parser)
    parser.set_defaults(resumes=True)


def run(args: argparse.Namespace) -> int:
    """Translate the missing shards and assemble the output directory."""
    args.output = os.path.normpath(args.output)
    bundles = [translate.find_parts(path, args) for path in args.models]
    langs = _languages(args, bundles[0])
    text = distilled.survey(args.text, langs)
    job = distilled.Job(args.output, text, args.choose, args.shard_lines, _settings(args, bundles, text))
    if job.is_finished():
        print(f"{args.output} is complete: {text.lines:,} pairs, checksums verified; nothing to do")
        return 0
    with job.locked():
        missing = job.missing()
        if missing:
            args.nbest = 1 if args.choose == "best" else args.beam
            head = list(islice(corpus.read_lines(text.paths[0]), HEAD))
            with Teachers(args, _workers(args, len(missing)), langs[1], head) as teachers:
                job.translate(teachers, missing)
        too_long = job.finish()
    note = f"; {too_long:,} too long for the teacher keep their reference" if too_long else ""
    print(f"{args.output}: {text.lines:,} pairs{note}")
    return 0


def _languages(args: argparse.Namespace, bundle: object) -> tuple[str, str]:
    """Return the languages of the teacher; the training text must have both."""
    from fairseq_deep.runtime import read_stored
    from fairseq_deep.runtime.loading import languages_of

    if not os.path.isdir(args.text):
        raise UsageError(f"--text {args.text}: no such directory; correct the path")
    source, target = languages_of(bundle, read_stored(bundle.checkpoint).task)
    try:
        for lang in (source, target):
            corpus.find_text(args.text, f"train.{lang}")
    except UsageError as error:
        raise UsageError(f"the teacher translates {source} to {target}: {error}") from None
    return source, target


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
        "--shard-lines": args.shard_lines,
    }


def _workers(args: argparse.Namespace, shards: int) -> int:
    import torch

    on_gpu = torch.cuda.is_available() and not args.cpu
    return min(args.workers or (1 if on_gpu else count_cores()), shards)
