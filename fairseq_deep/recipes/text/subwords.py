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
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display
from fairseq_deep.runtime.text import TAG, cutter_of, packages_named, tokenizer_of

from .corpus import Row, find_references, find_splits, in_folder, read_lines, read_rows, replaced_folder, write_rows

MAX_RATIO = 9  # maximum length ratio of the two sides, as in common corpus cleaning
BLOCK = 2000
PIECES_FROM = 10_000_000  # maximum number of sentences that SentencePiece learns from, drawn at random
COVERAGE = 0.9995  # SentencePiece's character coverage
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
tokenizer_of, cutter_of = functools.cache(tokenizer_of), functools.cache(cutter_of)  # once per process


class Settings(NamedTuple):
    """Settings of the segmentation into sub-words.

    Attributes:
        langs: source and target language
        bpe: "joint", "per-side" or "sentencepiece"
        merges: number of BPE merges or SentencePiece pieces
        max_words, max_subwords: maximum length of training sentences; 0 sub-words: no limit
        workers: number of processes
    """

    langs: tuple[str, str]
    bpe: str
    merges: int
    max_words: int
    max_subwords: int = 0
    lowercase: bool = False
    workers: int = 1

    @property
    def tokenizer(self) -> str:
        """The tokenizer that is applied before the sub-words."""
        return "none" if self.bpe == "sentencepiece" else "moses"


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


def processed(what: str, function: Callable[[list[Row]], list[Row]], paths: list[str], workers: int) -> Iterator[Row]:
    """Yield the rows of the files *paths*, processed by *function*, and show progress."""
    done, total = 0, sum(1 for _ in read_lines(paths[0]))
    with Display() as display:
        for block in spread(function, read_rows(paths), workers):
            done += len(block)
            display.show(what, done, total, "lines")
            yield from block


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


def tokenize_set(text: str, out: str, split: str, settings: Settings) -> None:
    """Write the tokenised set, and its further references, to NAME.tok; long training pairs are dropped."""
    names = [f"{split}.{lang}" for lang in settings.langs]
    names += find_references(text, split, settings.langs[1])
    langs = [settings.langs[0]] + [settings.langs[1]] * (len(names) - 1)
    step = partial(tokenize, langs, settings.tokenizer, settings.lowercase)
    rows = processed(f"tokenising {split}", step, [os.path.join(text, name) for name in names], settings.workers)

    def fits(row: Row) -> bool:
        least, most = sorted(len(side.split()) for side in row)
        return 0 < least and most <= settings.max_words and most <= MAX_RATIO * least

    if split == "train" and settings.bpe != "sentencepiece":  # without words, limits in words do not apply
        most = settings.max_words
        rows = kept(rows, fits, f"over {most} words or a length ratio over {MAX_RATIO}",
                    f"no training pair has 1 to {most} words per side (--max-words) and a length ratio of at most "
                    f"{MAX_RATIO}")  # fmt: skip
    write_rows([os.path.join(out, f"{name}.tok") for name in names], rows)


def training_lines(folder: str, langs: Sequence[str]) -> Iterator[str]:
    """Yield the tokenised training text of *langs* without tags."""
    for path in in_folder(folder, "train", (f"{lang}.tok" for lang in langs)):
        for line in read_lines(path):
            yield TAG.sub("", line, 1)


def learn(merges: int, langs: Sequence[str], code: str) -> str:
    """Learn merges on the tokenised training text of *langs*, and write them to the file *code*, which is returned."""
    from subword_nmt.learn_bpe import learn_bpe

    words = Counter(word for line in training_lines(os.path.dirname(code), langs) for word in line.split())
    if all(len(word) == 1 for word in words):  # subword-nmt would fail
        raise UsageError(f"the words of {' and '.join(langs)} are single characters, which have no merges; "
                         "use text with words, or --bpe sentencepiece")  # fmt: skip
    print(f"  learning {merges:,} merges from {len(words):,} distinct words of {' and '.join(langs)}", flush=True)
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(words.items())))
    with open(code, "w", encoding="utf-8") as stream, redirect_stderr(io.StringIO()):
        learn_bpe(vocabulary, stream, merges, is_dict=True)
    return code


def learn_pieces(settings: Settings, model: str) -> str:
    """Learn a vocabulary of pieces on the training text of both languages, and return the path of the *model*."""
    with packages_named():
        import sentencepiece as spm
    print(f"  learning {settings.merges:,} pieces", flush=True)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=training_lines(os.path.dirname(model), settings.langs), vocab_size=settings.merges,
            model_prefix=model.removesuffix(".model"), character_coverage=COVERAGE, input_sentence_size=PIECES_FROM,
            shuffle_input_sentence=True, hard_vocab_limit=False, num_threads=settings.workers, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as problem:
        raise UsageError(
            f"SentencePiece cannot learn {settings.merges:,} pieces from this text: {str(problem).splitlines()[-1]}"
        ) from None
    return model


def learn_codes(settings: Settings, folder: str) -> list[str]:
    """Return the file with the merges of each language."""
    source, target = settings.langs
    if settings.bpe == "sentencepiece":
        return [learn_pieces(settings, os.path.join(folder, "spm.model"))] * 2
    code = os.path.join(folder, "code")
    if settings.bpe == "per-side":
        return [learn(settings.merges, [source], code), learn(settings.merges, [target], f"{code}.{target}")]
    return [learn(settings.merges, settings.langs, code)] * 2


def cut_set(out: str, split: str, settings: Settings, codes: Sequence[str]) -> None:
    """Split a tokenised set into sub-words; the tokenised text remains for references only."""
    limit, names = settings.max_subwords, [f"{lang}.tok" for lang in settings.langs]
    tokenised = in_folder(out, split, names)
    rows = processed(f"sub-words of {split}", partial(cut, codes), tokenised, settings.workers)
    if split == "train" and limit:
        rows = kept(rows, lambda row: all(0 < len(side.split()) <= limit for side in row), f"over {limit} sub-words",
                    f"no training pair has 1 to {limit} sub-words per side: raise --max-subwords")  # fmt: skip
    write_rows(in_folder(out, split, settings.langs), rows)
    for path in tokenised if split == "train" else tokenised[:1]:
        os.remove(path)


def cut_corpus(text: str, out: str, settings: Settings) -> None:
    """Segment the text of the directory *text* into sub-words, and write it to the directory *out*.

    Raises:
        UsageError: all training pairs are too long, the text has no merges, or a process was killed
    """
    splits = find_splits(text, settings.langs[0])
    cutter_of.cache_clear()  # it may have the merges of another text with the same path
    for lang in settings.langs:
        tokenizer_of(lang, settings.tokenizer)("")  # jieba reads its dictionary before the processes are forked
    with replaced_folder(out) as tmp:
        for split in splits:
            tokenize_set(text, tmp, split, settings)
        codes = learn_codes(settings, tmp)
        with open(os.path.join(tmp, "steps.json"), "w", encoding="utf-8") as stream:  # for fairseq-deep translate
            json.dump({"tokenizer": settings.tokenizer, "lowercase": settings.lowercase}, stream)
        for split in splits:
            cut_set(tmp, split, settings, codes)
