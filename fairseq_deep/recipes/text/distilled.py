"""A distilled text: shards translated by ``fairseq-deep translate``, and the output directory that they form.

During translation, ``OUTPUT.unfinished`` contains ``settings.json`` and one file per finished shard of lines, written
atomically. OUTPUT itself is created at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import functools
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import iterate_lines
from fairseq_deep.tools.output_files import check_new_folder, write_text

from ..display import Display
from ..engine import Engine, Failed
from ..record import read_json
from ..watch import Watch
from .corpus import Row, find_text, in_folder, read_lines, read_rows, write_rows

RECORD = "distill.json"
SIZE = "--shard-lines"
SHARD = re.compile(r"[0-9]{6}\.json")
TRANSLATE = "fairseq-deep translate: "
"""The start of its errors."""


class Text(NamedTuple):
    """A parallel text.

    Attributes:
        folder, langs: directory; source and target language
        paths: the files of both sides
        lines: number of pairs
        hashes: hash of the lines of each side
    """

    folder: str
    langs: tuple[str, str]
    paths: tuple[str, str]
    lines: int
    hashes: tuple[str, str]


def survey(folder: str, langs: tuple[str, str]) -> Text:
    """Read the training text to count and hash its lines.

    Raises:
        UsageError: a side is missing, is not UTF-8, or has more lines than the other
    """
    paths = tuple(find_text(folder, f"train.{lang}") for lang in langs)
    digests, lines = [hashlib.sha256(), hashlib.sha256()], 0
    for row in read_rows(paths):
        lines += 1
        for digest, line in zip(digests, row):
            digest.update(f"{line}\n".encode())
    if not lines:
        raise UsageError(f"{paths[0]} is empty (0 lines): give a training text")
    return Text(folder, langs, paths, lines, tuple(digest.hexdigest() for digest in digests))


class Job:
    """One output directory.

    Args:
        output: its normalised path
        text: the text to translate
        size: lines per shard
        settings: all other settings; compared with the settings of an interrupted or finished job

    Raises:
        UsageError: the directory has other settings, is corrupt, or cannot be written
    """

    def __init__(self, output: str, text: Text, size: int, settings: dict[str, Any]):
        self.output, self.text, self.size = output, text, size
        self.settings = json.loads(json.dumps(settings))
        self.work = f"{output}.unfinished"
        self.count = -(-text.lines // size)

    def is_finished(self) -> bool:
        """Return whether the directory is complete, with the same settings."""
        record = read_json(os.path.join(self.output, RECORD))
        if not record:
            check_new_folder(self.output)
            return False
        _check_same(record.get("settings", {}), self.settings, self.output)
        for name in _others(self.text):
            paths = [os.path.join(folder, name) for folder in (self.output, self.text.folder)]
            if not os.path.isfile(paths[0]) or not filecmp.cmp(*paths, shallow=False):
                raise UsageError(f"{paths[0]} is not the present {paths[1]}: copy it, or use another --output")
        shutil.rmtree(self.work, ignore_errors=True)
        return True

    @contextlib.contextmanager
    def begun(self, engine: Engine) -> Iterator[None]:
        """Lock the directory of the shards, and check that it belongs to this job; remove it if no shard succeeds."""
        path, settings = os.path.join(self.work, "settings.json"), {**self.settings, SIZE: self.size}
        engine.take_lock(self.work, "lock", "--output")
        try:
            if self.finished():
                _check_same(read_json(path), settings, self.work)
            else:  # new, or a call that was corrected
                write_text(path, json.dumps(settings, indent=1) + "\n")
            yield
        except OSError as error:
            problem = f"cannot write {error.filename or self.work}: {error.strerror or error}; the same command resumes"
            raise UsageError(problem) from error
        finally:
            if os.path.isdir(self.work) and not self.finished():
                shutil.rmtree(self.work, ignore_errors=True)

    def finished(self) -> set[int]:
        """Return the numbers of the finished shards, which are written atomically."""
        return {int(name[:6]) for name in os.listdir(self.work) if SHARD.fullmatch(name)}

    def path_of(self, number: int) -> str:
        """Return the path of a shard."""
        return os.path.join(self.work, f"{number:06d}.json")

    def missing(self) -> set[int]:
        """Return the numbers of the missing shards."""
        return {*range(self.count)} - self.finished()

    async def translate(
        self, engine: Engine, words: list[str], missing: set[int], environments: list[dict[str, str]]
    ) -> None:
        """Translate the *missing* shards, one process at a time in each of the *environments*.

        Args:
            words: arguments of ``translate``

        Raises:
            Stopped: a signal has stopped the processes
        """
        shards = self._shards(missing)

        def show() -> None:
            display.show("distill", len(self.finished()), self.count, "shards")

        async def work(environment: dict[str, str]) -> None:
            for number, rows in shards:
                await self._translate(engine, words, number, rows, environment)
                show()

        with Display() as display:
            show()
            workers = [asyncio.create_task(work(each)) for each in environments]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.wait(workers)

    async def _translate(
        self, engine: Engine, words: list[str], number: int, rows: list[Row], environment: dict[str, str]
    ) -> None:
        """Translate a shard; a line that is too long for the teacher keeps its reference."""
        source, output, log = (f"{self.path_of(number)}.{end}" for end in ("in", "out", "log"))
        write_text(source, "".join(f"{line}\n" for line, _ in rows))
        command = [sys.executable, "-P", "-m", "fairseq_deep", "translate", *words, "--json", "--input", source]
        silent = Watch(Display(math.inf, sys.stdout))
        try:
            await engine.run([*command, "--output", output], log, silent, environment, accepted=(0, 1))
        except Failed as failure:
            problem = str(failure)
            if problem.startswith(TRANSLATE):
                raise UsageError(problem.removeprefix(TRANSLATE)) from None
            raise UsageError(f"{problem}; run the same command again to resume, with fewer --workers") from None
        records = map(json.loads, iterate_lines(output))
        found = [[each["text"] for each in record["translations"]] for record in records]
        targets = [nearest(self.text.langs[1], each, reference) for each, (_, reference) in zip(found, rows)]
        content = {"targets": targets, "too_long": sum(not hypotheses for hypotheses in found)}
        write_text(self.path_of(number), json.dumps(content, ensure_ascii=False) + "\n")
        for path in (source, output, log):
            os.remove(path)

    def _shards(self, missing: set[int]) -> Iterator[tuple[int, list[Row]]]:
        """Yield the numbers of the *missing* shards, and their pairs."""
        pairs = read_rows(self.text.paths)
        for number in range(self.count):
            rows = [*islice(pairs, self.size)]
            if number in missing:
                yield number, rows

    def finish(self) -> int:
        """Assemble the output directory, and return the number of lines that were too long for the teacher."""
        folder, too_long = os.path.join(self.work, "text"), 0

        def targets() -> Iterator[str]:
            nonlocal too_long
            for number in range(self.count):
                shard = read_json(self.path_of(number))
                yield from shard["targets"]
                too_long += shard["too_long"]

        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        for name in _others(self.text):
            shutil.copyfile(os.path.join(self.text.folder, name), os.path.join(folder, name))
        write_rows(in_folder(folder, "train", self.text.langs), zip(read_lines(self.text.paths[0]), targets()))
        record = {"pairs": self.text.lines, "too_long": too_long, "settings": self.settings}
        write_text(os.path.join(folder, RECORD), json.dumps(record, indent=1) + "\n")
        os.rename(folder, self.output)
        shutil.rmtree(self.work, ignore_errors=True)
        return too_long


def nearest(lang: str, hypotheses: list[str], reference: str) -> str:
    """Return the hypothesis with the highest sentence BLEU, the better ranked one on a tie; if none, the reference."""
    if len(hypotheses) < 2:
        return hypotheses[0] if hypotheses else reference
    metric = _bleu(lang)
    return max(hypotheses, key=lambda text: metric.sentence_score(text, [reference]).score)


@functools.cache
def _bleu(lang: str) -> Any:
    """Return sentence BLEU with the tokenizer of the target language."""
    from fairseq_deep.plugin.bleu import bleu_for

    return bleu_for(lang, effective_order=True)


def _others(text: Text) -> list[str]:
    """Return the files of the other sets, including further references."""
    source, target = map(re.escape, text.langs)
    pattern = re.compile(rf"(valid|test\d*)\.({source}|{target}|{target}\.ref\d+)(\.gz)?|test\.domain")
    return sorted(filter(pattern.fullmatch, os.listdir(text.folder)))


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: str) -> None:
    """Reject settings that differ from those that *folder* was begun with."""
    other = [name for name, value in now.items() if before.get(name) != value]
    if other:
        raise UsageError(f"{folder} was written with another {', another '.join(other)}: use the same, or another "
                         "--output")  # fmt: skip
