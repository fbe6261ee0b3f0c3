"""Tokenisation of parallel text, removal of long training pairs, and segmentation into sub-words.

Input and output files are {train,valid,test,test1 ...}.LANG. The new directory also contains the merges: ``code`` for
both languages, ``code`` for the source and ``code.LANG`` for the target, or SentencePiece's ``spm.model``, which does
not require tokenised text. All references, except the training set's, are also written tokenised, for BLEU on tokens:
test.LANG.tok, test.LANG.ref1.tok and so on; fairseq-generate prints <<unk>> for their unknown words. All steps process
blocks of lines in several processes, so millions of pairs need little memory.
"""

import functools
import io
import json
import multiprocessing
import os
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from itertools import islice, starmap
from typing import NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display
from fairseq_deep.runtime.text import TAG, cutter_of, packages_named, tokenizer_of

from .corpus import PairWriter, find_references, find_splits, read_lines, replaced_folder

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

    langs: tuple
    bpe: str
    merges: int
    max_words: int
    max_subwords: int = 0
    lowercase: bool = False
    workers: int = 1

    @property
    def tokenizer(self):
        """The tokenizer that is applied before the sub-words."""
        return "none" if self.bpe == "sentencepiece" else "moses"


def tokenize_pairs(langs, pairs, kind, lowercase):
    sides = (map(tokenizer_of(lang, kind, lowercase), side) for lang, side in zip(langs, zip(*pairs)))
    return list(zip(*sides))


def apply_block(code, lines):
    return list(map(cutter_of(code), lines))


def blocks(items):
    items = iter(items)
    return iter(lambda: list(islice(items, BLOCK)), [])


def spread(function, jobs, workers):
    """Yield ``function(*job)`` for every job, in order, over ``workers`` processes.

    Raises:
        UsageError: a process was killed
    """
    if workers == 1:
        yield from starmap(function, jobs)
        return
    method = "fork" if multiprocessing.get_start_method() == "forkserver" else None  # where each would import torch
    context, waiting = multiprocessing.get_context(method), []
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        for job in jobs:
            waiting.append(_submit(pool, function, job))
            if len(waiting) > 4 * workers:
                yield waiting.pop(0).result()
        for result in waiting:
            yield result.result()
    except BrokenProcessPool:
        problem = "a process of text preparation was killed, possibly for lack of memory"
        raise UsageError(f"{problem}: use fewer --workers than {workers}, and run the same command again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool, function, job):
    """Submit a job; a worker that receives a signal before it has installed its handlers would ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return pool.submit(function, *job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the pool stops its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def shown(what, path, results):
    """Yield *results*, blocks of lines of the file *path*, and show progress."""
    with open(path, "rb") as stream:
        done, total = 0, sum(1 for _ in stream)
    with Display() as display:
        for block in results:
            done += len(block)
            display.show(what, done, total, "lines")
            yield block


def fits(pair, max_words):
    lengths = sorted(len(side.split()) for side in pair)
    return 0 < lengths[0] and lengths[1] <= max_words and lengths[1] <= MAX_RATIO * lengths[0]


def tokenize_split(args, text, split, tmp):
    """Write the tokenised ``split`` to ``tmp``, and return the numbers of pairs kept and dropped."""
    langs, dropped = args.langs, 0
    paths = [os.path.join(text, f"{split}.{lang}") for lang in langs]
    jobs = ((langs, block, args.tokenizer, args.lowercase) for block in blocks(zip(*map(read_lines, paths))))
    plain = args.bpe == "sentencepiece"  # without words, limits in words do not apply
    with PairWriter(os.path.join(tmp, f"{split}.tok.{lang}") for lang in langs) as writer:
        for block in shown(f"tokenising {split}", paths[0], spread(tokenize_pairs, jobs, args.workers)):
            for pair in block:
                if split == "train" and not plain and not fits(pair, args.max_words):
                    dropped += 1
                    continue
                writer.add(pair)
    return writer.count, dropped


def tokenize_references(args, text, split, tmp):
    """Write the references of a set to ``tmp``, tokenised like the hypotheses."""
    lang = args.langs[1]
    for name in (f"{split}.{lang}", *find_references(text, split, lang)):
        lines = zip(read_lines(os.path.join(text, name)))
        jobs = (((lang,), block, args.tokenizer, args.lowercase) for block in blocks(lines))
        with open(os.path.join(tmp, f"{name}.tok"), "w", encoding="utf-8") as stream:
            for block in spread(tokenize_pairs, jobs, args.workers):
                stream.writelines(line + "\n" for (line,) in block)


def learn(args, langs, code):
    """Learn merges on the tokenised training text of ``langs`` and write them to ``code``."""
    from subword_nmt.learn_bpe import learn_bpe

    words, tmp = Counter(), os.path.dirname(code)
    for lang in langs:
        for line in read_lines(os.path.join(tmp, f"train.tok.{lang}")):
            words.update(TAG.sub("", line, 1).split())
    if all(len(word) == 1 for word in words):  # subword-nmt would fail
        raise UsageError(f"the words of {' and '.join(langs)} are single characters, which have no merges; "
                         "use text with words, or --bpe sentencepiece")  # fmt: skip
    print(f"  learning {args.merges:,} merges from {len(words):,} distinct words of {' and '.join(langs)}", flush=True)
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(words.items())))
    with open(code, "w", encoding="utf-8") as stream, redirect_stderr(io.StringIO()):
        learn_bpe(vocabulary, stream, args.merges, is_dict=True)


def learn_pieces(args, langs, model):
    """Learn a vocabulary of ``args.merges`` pieces on the training text of all ``langs``."""
    with packages_named():
        import sentencepiece as spm
    paths = (os.path.join(os.path.dirname(model), f"train.tok.{lang}") for lang in langs)
    lines = (TAG.sub("", line, 1) for path in paths for line in read_lines(path))
    print(f"  learning {args.merges:,} pieces", flush=True)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=lines, model_prefix=model[: -len(".model")], vocab_size=args.merges,
            character_coverage=COVERAGE, input_sentence_size=PIECES_FROM, shuffle_input_sentence=True,
            hard_vocab_limit=False, num_threads=args.workers, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as problem:
        raise UsageError(
            f"SentencePiece cannot learn {args.merges:,} pieces from this text: {str(problem).splitlines()[-1]}"
        ) from None


def learn_codes(args, langs, tmp):
    """Return the file with the merges of each language."""
    if args.bpe == "sentencepiece":
        code = os.path.join(tmp, "spm.model")
        learn_pieces(args, langs, code)
    elif args.bpe == "per-side":
        codes = [os.path.join(tmp, name) for name in ("code", f"code.{langs[1]}")]
        for lang, code in zip(langs, codes):
            learn(args, [lang], code)
        return codes
    else:
        code = os.path.join(tmp, "code")
        learn(args, langs, code)
    return [code, code]


def apply_split(args, split, lang, code, tmp):
    tokenised = os.path.join(tmp, f"{split}.tok.{lang}")
    jobs = ((code, block) for block in blocks(read_lines(tokenised)))
    cut = spread(apply_block, jobs, args.workers)
    with open(os.path.join(tmp, f"{split}.{lang}"), "w", encoding="utf-8") as stream:
        for block in shown(f"sub-words of {split}.{lang}", tokenised, cut):
            stream.writelines(line + "\n" for line in block)
    os.remove(tokenised)


def drop_long(langs, limit, tmp):
    """Remove training pairs with more than ``limit`` sub-words per side."""
    paths, dropped = [os.path.join(tmp, f"train.{lang}") for lang in langs], 0
    with PairWriter(f"{path}.short" for path in paths) as writer:
        for pair in zip(*map(read_lines, paths)):
            if all(0 < len(side.split()) <= limit for side in pair):
                writer.add(pair)
            else:
                dropped += 1
    if not writer.count:
        raise UsageError(f"no training pair has 1 to {limit} sub-words per side: raise --max-subwords")
    for path in paths:
        os.replace(f"{path}.short", path)
    if dropped:
        print(f"  {dropped:,} training pairs dropped: over {limit} sub-words")


def cut_corpus(text, out, settings):
    """Segment the text of the directory *text* into sub-words, and write it to the directory *out*."""
    langs, splits = settings.langs, find_splits(text, settings.langs[0])
    cutter_of.cache_clear()  # it may have the merges of another text with the same path
    for lang in langs:
        tokenizer_of(lang, settings.tokenizer)("")  # jieba reads its dictionary before the processes are forked
    with replaced_folder(out) as tmp:
        for split in splits:
            kept, dropped = tokenize_split(settings, text, split, tmp)
            if split == "train" and not kept:
                raise UsageError(
                    f"no training pair has 1 to {settings.max_words} words per side (--max-words) and a length ratio "
                    f"of at most {MAX_RATIO}"
                )
            if dropped:
                reason = f"over {settings.max_words} words or a length ratio over {MAX_RATIO}"
                print(f"  {dropped:,} training pairs dropped: {reason}")
            if split != "train":
                tokenize_references(settings, text, split, tmp)
        codes = learn_codes(settings, langs, tmp)
        with open(os.path.join(tmp, "steps.json"), "w", encoding="utf-8") as stream:  # for fairseq-deep translate
            json.dump({"tokenizer": settings.tokenizer, "lowercase": settings.lowercase}, stream)
        for split in splits:
            for lang, code in zip(langs, codes):
                apply_split(settings, split, lang, code, tmp)
        if settings.max_subwords:
            drop_long(langs, settings.max_subwords, tmp)
