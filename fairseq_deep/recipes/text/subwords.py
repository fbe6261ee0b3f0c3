"""Tokenisation of parallel text, removal of long training pairs, and segmentation into sub-words.

Input and output files are {train,valid,test,test1 ...}.LANG. The new directory also contains the merges: ``code`` for
both languages, ``code`` for the source and ``code.LANG`` for the target, or SentencePiece's ``spm.model``, which does
not require tokenised text. All references, except the training set's, are also written tokenised, for BLEU on tokens:
test.LANG.tok, test.LANG.ref1.tok and so on; fairseq-generate prints <<unk>> for their unknown words. All steps process
blocks of lines in several processes, so millions of pairs need little memory.
"""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display
from fairseq_deep.runtime.text import TAG, cutter_of, packages_named, tokenizer_of

from .corpus import Row, find_references, find_splits, in_folder, read_lines, read_rows, replaced_folder, write_rows

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

MAX_RATIO = 9  # maximum length ratio of the two sides, as in common corpus cleaning
BLOCK = 2000
PIECES_FROM = 10_000_000  # maximum number of sentences that SentencePiece learns from, drawn at random
COVERAGE = 0.9995  # SentencePiece's character coverage
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
tokenizer_of, cutter_of = functools.cache(tokenizer_of), functools.cache(cutter_of)  # once per process


def tokenize(langs: Sequence[str], kind: str, lowercase: bool, rows: list[Row]) -> list[Row]:
    """Tokenise *rows* with columns in *langs*."""
    columns = [map(tokenizer_of(lang, kind, lowercase), column) for lang, column in zip(langs, zip(*rows))]
    return [*zip(*columns)]


def cut(codes: Sequence[str], rows: list[Row]) -> list[Row]:
    """Split *rows* into sub-words, each column with its own merges."""
    return [*zip(*(map(cutter_of(code), column) for code, column in zip(codes, zip(*rows))))]


def spread(function: Callable[[list], Any], rows: Iterable, workers: int) -> Iterator[Any]:
    """Yield the results of *function* for blocks of *rows*, in order, over several processes.

    Raises:
        UsageError: a process was killed
    """
    rows = iter(rows)
    blocks = iter(lambda: [*islice(rows, BLOCK)], [])
    if workers == 1:
        yield from map(function, blocks)
        return
    method = "fork" if multiprocessing.get_start_method() == "forkserver" else None  # where each would import torch
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), initializer=_begin_worker)
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # workers inherit handlers that they must replace
        pool.submit(int)  # starts all workers
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        waiting = deque(pool.submit(function, block) for block in islice(blocks, 4 * workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(function, block) for block in islice(blocks, 1))
    except BrokenProcessPool:
        problem = "a process of text preparation was killed, possibly for lack of memory"
        raise UsageError(f"{problem}: use fewer --workers than {workers}, and run the same command again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the pool stops its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def kept(rows: Iterator[Row], fits: Callable[[Row], bool], reason: str, problem: str) -> Iterator[Row]:
    """Yield the training pairs that fit, and print the number of others.

    Raises:
        UsageError: no pair fits: *problem*
    """
    counts = Counter()
    for row in rows:
        fit = fits(row)
        counts[fit] += 1
        if fit:
            yield row
    if not counts[True]:
        raise UsageError(problem)
    if counts[False]:
        print(f"  {counts[False]:,} training pairs dropped: {reason}")


class Segmentation:
    """The sub-words of one text.

    Args:
        text: directory of the text
        out: directory of the sub-words
        plan: has the languages and the options
    """

    def __init__(self, text: str, out: str, plan: Plan):
        self.text, self.out, self.langs, self.options = text, out, plan.langs, plan.options
        self.tokenizer = "none" if plan.options.bpe == "sentencepiece" else "moses"

    def processed(self, what: str, function: Callable[[list[Row]], list[Row]], paths: list[str]) -> Iterator[Row]:
        """Yield the rows of the files *paths*, processed by *function*, and show progress."""
        done, total = 0, sum(1 for _ in read_lines(paths[0]))
        with Display() as display:
            for block in spread(function, read_rows(paths), self.options.workers):
                done += len(block)
                display.show(what, done, total, "lines")
                yield from block

    def tokenize(self, split: str) -> None:
        """Write the tokenised set, and its further references, to NAME.tok; long training pairs are dropped."""
        (source, target), most = self.langs, self.options.max_words
        names = [f"{split}.{source}", f"{split}.{target}", *find_references(self.text, split, target)]
        langs = [source] + [target] * (len(names) - 1)
        step = partial(tokenize, langs, self.tokenizer, self.options.lowercase)
        rows = self.processed(f"tokenising {split}", step, [os.path.join(self.text, name) for name in names])

        def fits(row: Row) -> bool:
            shorter, longer = sorted(len(side.split()) for side in row)
            return 0 < shorter and longer <= most and longer <= MAX_RATIO * shorter

        if split == "train" and self.tokenizer != "none":  # without words, limits in words do not apply
            rows = kept(rows, fits, f"over {most} words or a length ratio over {MAX_RATIO}",
                        f"no training pair has 1 to {most} words per side (--max-words) and a length ratio of at most "
                        f"{MAX_RATIO}")  # fmt: skip
        write_rows([os.path.join(self.out, f"{name}.tok") for name in names], rows)

    def training_lines(self, langs: Sequence[str]) -> Iterator[str]:
        """Yield the tokenised training text of *langs* without tags."""
        for path in in_folder(self.out, "train", (f"{lang}.tok" for lang in langs)):
            for line in read_lines(path):
                yield TAG.sub("", line, 1)

    def learn_merges(self, langs: Sequence[str], name: str) -> str:
        """Learn merges on the training text of *langs*, and return the path of their file *name*."""
        from subword_nmt.learn_bpe import learn_bpe

        count, code = self.options.bpe_merges, os.path.join(self.out, name)
        words = Counter(word for line in self.training_lines(langs) for word in line.split())
        if all(len(word) == 1 for word in words):  # subword-nmt would fail
            raise UsageError(f"the words of {' and '.join(langs)} are single characters, which have no merges; "
                             "use text with words, or --bpe sentencepiece")  # fmt: skip
        print(f"  learning {count:,} merges from {len(words):,} distinct words of {' and '.join(langs)}", flush=True)
        vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(words.items())))
        with open(code, "w", encoding="utf-8") as stream, redirect_stderr(io.StringIO()):
            learn_bpe(vocabulary, stream, count, is_dict=True)
        return code

    def learn_pieces(self) -> str:
        """Learn a vocabulary of pieces on the training text of both languages, and return the path of the model."""
        with packages_named():
            import sentencepiece as spm
        count, prefix = self.options.bpe_merges, os.path.join(self.out, "spm")
        print(f"  learning {count:,} pieces", flush=True)
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=self.training_lines(self.langs), vocab_size=count, model_prefix=prefix,
                character_coverage=COVERAGE, input_sentence_size=PIECES_FROM, shuffle_input_sentence=True,
                hard_vocab_limit=False, num_threads=self.options.workers, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as problem:
            raise UsageError(
                f"SentencePiece cannot learn {count:,} pieces from this text: {str(problem).splitlines()[-1]}"
            ) from None
        return f"{prefix}.model"

    def learn(self) -> list[str]:
        """Return the file with the merges of each language."""
        source, target = self.langs
        if self.options.bpe == "sentencepiece":
            return [self.learn_pieces()] * 2
        if self.options.bpe == "per-side":
            return [self.learn_merges([source], "code"), self.learn_merges([target], f"code.{target}")]
        return [self.learn_merges(self.langs, "code")] * 2

    def cut(self, split: str, codes: Sequence[str]) -> None:
        """Split a tokenised set into sub-words; the tokenised text remains for references only."""
        limit = self.options.max_subwords
        tokenised = in_folder(self.out, split, (f"{lang}.tok" for lang in self.langs))
        rows = self.processed(f"sub-words of {split}", partial(cut, codes), tokenised)

        def fits(row: Row) -> bool:
            return all(0 < len(side.split()) <= limit for side in row)

        if split == "train" and limit:
            rows = kept(rows, fits, f"over {limit} sub-words",
                        f"no training pair has 1 to {limit} sub-words per side: raise --max-subwords")  # fmt: skip
        write_rows(in_folder(self.out, split, self.langs), rows)
        for path in tokenised if split == "train" else tokenised[:1]:
            os.remove(path)

    def run(self) -> None:
        """Write the sub-words of all sets, and what ``fairseq-deep translate`` needs to do the same."""
        cutter_of.cache_clear()  # it may have the merges of another text with the same path
        for lang in self.langs:
            tokenizer_of(lang, self.tokenizer)("")  # jieba reads its dictionary before the processes are forked
        splits = find_splits(self.text, self.langs[0])
        for split in splits:
            self.tokenize(split)
        codes = self.learn()
        with open(os.path.join(self.out, "steps.json"), "w", encoding="utf-8") as stream:
            json.dump({"tokenizer": self.tokenizer, "lowercase": self.options.lowercase}, stream)
        for split in splits:
            self.cut(split, codes)


def cut_corpus(text: str, out: str, plan: Plan) -> None:
    """Segment the text of the directory *text* into sub-words, and write it to the directory *out*.

    Raises:
        UsageError: all training pairs are too long, the text has no merges, or a process was killed
    """
    with replaced_folder(out) as tmp:
        Segmentation(text, tmp, plan).run()
