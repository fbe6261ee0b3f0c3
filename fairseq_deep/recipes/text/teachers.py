"""Processes that translate shards of text, each with its own `Translator`.

They read shards as lines of JSON from stdin and exit at its end, so no process survives the command.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.tools import translate
from fairseq_deep.tools.machine import count_cores
from fairseq_deep.tools.output_files import write_text

from .distilled import Shard

PROGRAM = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import serve; serve()"
MOST_UNKNOWN = 0.3
"""Share of unknown tokens above which a text is not considered to be in the teacher's source language."""


class Teachers:
    """A pool of processes.

    Args:
        args: arguments of ``distill``
        workers: number of processes
        lang: target language, for BLEU's tokenizer
        head: first lines of the text, which show whether it is in the teacher's source language
    """

    def __init__(self, args: argparse.Namespace, workers: int, lang: str, head: list[str]):
        names = ("models", "nbest", "choose", "batch_size", "max_tokens", "cpu", "decode_precision", "data",
                 "bpe_codes", "tokenizer", "lowercase", "source_lang", "target_lang", "gnmt_lenpen")  # fmt: skip
        settings = {name: getattr(args, name) for name in (*names, *translate.SEARCH)}
        threads = str(max(1, count_cores() // workers))
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        self.first, self.children = json.dumps({"head": head, **settings, "lang": lang}) + "\n", []
        self.command, self.environment, self.workers = [sys.executable, "-c", PROGRAM, *sys.path], environment, workers

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()

    def translate(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """Translate *shards* and write their files; yield each finished shard.

        Raises:
            UsageError: a process reports an error, or has ended
        """
        lock, results = threading.Lock(), queue.Queue()

        def drive(child: subprocess.Popen) -> None:
            try:
                _ask(child, self.first)
                while True:
                    with lock:
                        shard = next(shards, None)
                    if shard is None:
                        break
                    _ask(child, json.dumps(shard._asdict()) + "\n")
                    results.put(shard)
            except Exception as error:
                results.put(error)
            results.put(None)

        for _ in range(self.workers):
            child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                     encoding="utf-8", env=self.environment)  # fmt: skip
            self.children.append(child)
            threading.Thread(target=drive, args=(child,), daemon=True).start()
        running = self.workers
        while running:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                running -= 1
            else:
                yield result


def _ask(child: subprocess.Popen, line: str) -> str:
    """Send *line* to a process and return its answer.

    Raises:
        UsageError: the process reports an error, or has ended
    """
    try:
        child.stdin.write(line)
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = ""
    if not answer.endswith("\n"):
        child.kill()
        raise UsageError(f"a translating process has ended (status {child.wait()}), perhaps out of memory: run the "
                         "same command again to resume, with fewer --workers")  # fmt: skip
    reply = json.loads(answer)
    if "error" in reply:
        raise UsageError(reply["error"])
    return reply["state"]


def serve() -> None:
    """Run a process: answer the settings and each shard."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent process ends it
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    logging.getLogger("fairseq_deep").setLevel(logging.ERROR)

    def reply(**answer: str) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    try:
        lines = iter(sys.stdin.buffer.readline, b"")
        args = argparse.Namespace(**json.loads(next(lines)))
        translator = translate.load(args, [translate.find_parts(path, args) for path in args.models])
        _check_language(translator, args.head)
        reply(state="ready")
        for line in lines:
            _translate(args, translator, Shard(**json.loads(line)))
            reply(state="done")
    except UsageError as error:
        reply(error=error.message)
    except Exception as error:
        reply(error=f"{type(error).__name__}: {one_line(error)}")


def _translate(args: argparse.Namespace, translator: Any, shard: Shard) -> None:
    """Translate a *shard* and write its file; a line that is too long for the teacher keeps its reference."""
    targets, too_long = [], 0
    for chunk in translate.split(zip(shard.sources, shard.references), translate.CHUNK):
        for (_, reference), found in zip(chunk, translator.translate_nbest([source for source, _ in chunk])):
            too_long += not found
            targets.append(_choose(args, [each.text for each in found], reference))
    write_text(shard.path, json.dumps({"targets": targets, "too_long": too_long}, ensure_ascii=False) + "\n")


def _check_language(translator: Any, sources: list[str]) -> None:
    """Reject a text with too many tokens outside of the teacher's dictionary."""
    units = [unit for line in sources for unit in translator.text.prepare(line).split()]
    unknown = sum(unit not in translator.source.indices for unit in units)
    if unknown > MOST_UNKNOWN * len(units):
        raise UsageError(f"the teacher's dictionary lacks {100 * unknown / len(units):.0f} % of the source tokens: "
                         "give text in its language, prepared for this model")  # fmt: skip


def _choose(args: argparse.Namespace, hypotheses: list[str], reference: str) -> str:
    """Return the best hypothesis, or the nearest to the *reference*; ties are resolved by rank."""
    if not hypotheses:
        return reference
    if args.choose == "best" or len(hypotheses) == 1:
        return hypotheses[0]
    metric = _bleu(args.lang)
    return max(hypotheses, key=lambda text: metric.sentence_score(text, [reference]).score)


@functools.cache
def _bleu(lang: str) -> Any:
    """Return sentence BLEU with the tokenizer of the target language."""
    from fairseq_deep.plugin.bleu import bleu_for

    return bleu_for(lang, effective_order=True)
