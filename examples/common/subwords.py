"""Tokenise a parallel corpus with sacremoses, clean the training part by length, and cut it into joint BPE units.

Writes {train,valid,test}.LANG and the merges (``code``) to a new folder.  Every step works on blocks of lines in
several processes, so that millions of pairs need little memory.
"""

import argparse
import io
import json
import os
import time
from collections import Counter
from contextlib import redirect_stderr
from itertools import islice, starmap
from multiprocessing import Pool

from corpus import SPLITS, die, read_lines, replaced_folder, run
from sacremoses import MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

MAX_RATIO = 9  # longer side over shorter side, as in the usual corpus cleaning
BLOCK = 2000
_tokenizers = {}
_bpe = None


def load_bpe(code):
    global _bpe
    with open(code, encoding="utf-8") as stream:
        _bpe = BPE(stream)


def tokenize_block(lang, lines, lowercase):
    tokenizer = _tokenizers.setdefault(lang, MosesTokenizer(lang))
    tokens = (tokenizer.tokenize(line.lower() if lowercase else line, return_str=True) for line in lines)
    return [" ".join(line.split()) for line in tokens]


def tokenize_pairs(langs, pairs, lowercase):
    return list(zip(*(tokenize_block(lang, side, lowercase) for lang, side in zip(langs, zip(*pairs)))))


def apply_block(lines):
    return [_bpe.process_line(line) for line in lines]


def blocks(items):
    items = iter(items)
    return iter(lambda: list(islice(items, BLOCK)), [])


def spread(function, jobs, workers, initializer=None, initargs=()):
    """Yield ``function(*job)`` for every job, in order, over ``workers`` processes."""
    if workers == 1:
        if initializer:
            initializer(*initargs)
        yield from starmap(function, jobs)
        return
    with Pool(workers, initializer, initargs) as pool:
        waiting = []
        for job in jobs:
            waiting.append(pool.apply_async(function, job))
            if len(waiting) > 4 * workers:
                yield waiting.pop(0).get()
        for result in waiting:
            yield result.get()


class Ticker:
    """A line of progress, at most one every ten seconds."""

    def __init__(self, what):
        self.what, self.count, self.begun = what, 0, time.time()
        self.shown = self.begun

    def add(self, n):
        self.count += n
        if time.time() - self.shown >= 10:
            self.shown = time.time()
            pace = self.count / (self.shown - self.begun)
            print(f"  {self.what}: {self.count:,} lines, {pace:,.0f} a second", flush=True)


def fits(pair, max_words):
    lengths = sorted(len(side.split()) for side in pair)
    return 0 < lengths[0] and lengths[1] <= max_words and lengths[1] <= MAX_RATIO * lengths[0]


def tokenize_split(args, split, tmp):
    """Write the tokenised ``split`` to ``tmp``; return the pairs kept and dropped."""
    langs, ticker, kept, dropped = (args.source_lang, args.target_lang), Ticker(f"tokenising {split}"), 0, 0
    pairs = zip(*(read_lines(os.path.join(args.text, f"{split}.{lang}")) for lang in langs))
    jobs = ((langs, block, args.lowercase) for block in blocks(pairs))
    files = [open(os.path.join(tmp, f"{split}.tok.{lang}"), "w", encoding="utf-8") for lang in langs]
    with files[0], files[1]:
        for block in spread(tokenize_pairs, jobs, args.workers):
            ticker.add(len(block))
            for pair in block:
                if split == "train" and not fits(pair, args.max_words):
                    dropped += 1
                    continue
                kept += 1
                for stream, line in zip(files, pair):
                    print(line, file=stream)
    return kept, dropped


def learn(args, tmp):
    """Learn joint merges on both sides of the tokenised training text."""
    words = Counter()
    for lang in (args.source_lang, args.target_lang):
        for line in read_lines(os.path.join(tmp, f"train.tok.{lang}")):
            words.update(line.split())
    print(f"  learning {args.merges:,} merges from {len(words):,} distinct words", flush=True)
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(words.items())))
    with open(os.path.join(tmp, "code"), "w", encoding="utf-8") as stream, redirect_stderr(io.StringIO()):
        learn_bpe(vocabulary, stream, args.merges, is_dict=True)


def apply_split(args, split, lang, tmp):
    tokenised = os.path.join(tmp, f"{split}.tok.{lang}")
    jobs = ((block,) for block in blocks(read_lines(tokenised)))
    ticker = Ticker(f"sub-words of {split}.{lang}")
    with open(os.path.join(tmp, f"{split}.{lang}"), "w", encoding="utf-8") as stream:
        for block in spread(apply_block, jobs, args.workers, load_bpe, (os.path.join(tmp, "code"),)):
            ticker.add(len(block))
            stream.writelines(line + "\n" for line in block)
    os.remove(tokenised)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--text", required=True, help="folder with the plain text")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--merges", type=int, required=True)
    parser.add_argument("--max-words", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lowercase", action="store_true")
    args = parser.parse_args()
    with replaced_folder(args.out) as tmp:
        for split in SPLITS:
            kept, dropped = tokenize_split(args, split, tmp)
            if split == "train" and not kept:
                die(f"no training pair has 1 to {args.max_words} words a side: see --max-words")
            if dropped:
                reason = f"over {args.max_words} words or a length ratio over {MAX_RATIO}"
                print(f"  {dropped:,} training pairs dropped: {reason}")
        learn(args, tmp)
        with open(os.path.join(tmp, "steps.json"), "w", encoding="utf-8") as stream:  # for fairseq-deep translate
            json.dump({"tokenizer": "moses", "lowercase": args.lowercase}, stream)
        for split in SPLITS:
            for lang in (args.source_lang, args.target_lang):
                apply_split(args, split, lang, tmp)


if __name__ == "__main__":
    run(main)
