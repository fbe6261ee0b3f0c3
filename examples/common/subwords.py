"""Tokenise parallel text, drop training pairs that are too long, and cut words into sub-words.

Reads {train,valid,test,test1 ...}.LANG and writes the same names, with the merges, to a new folder: ``code`` for both
languages, or ``code`` for the source and ``code.LANG`` for the target, or ``spm.model`` of SentencePiece, which takes
the text as it is.  Every step works on blocks of lines in several processes, so that millions of pairs need little
memory.
"""

import argparse
import importlib
import io
import json
import os
import re
import time
from collections import Counter
from contextlib import redirect_stderr
from itertools import islice, starmap
from multiprocessing import Pool

from corpus import die, find_splits, read_lines, replaced_folder, run
from sacremoses import MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

MAX_RATIO = 9  # longer side over shorter side, as in the usual corpus cleaning
BLOCK = 2000
TAG = re.compile(r"<2[^\s>]+> ?")  # of the target language, before a source; no sub-word model sees it
PIECES_FROM = 10_000_000  # sentences that SentencePiece learns from, drawn at random
COVERAGE = 0.9995  # of characters, by SentencePiece's vocabulary
_tokenizers = {}
_cut = None


def load_merges(code):
    global _cut
    if code.endswith(".model"):
        model = import_package("sentencepiece").SentencePieceProcessor(model_file=code)

        def _cut(line):
            return " ".join(model.encode(line, out_type=str))
    else:
        with open(code, encoding="utf-8") as stream:
            _cut = BPE(stream).process_line


def import_package(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        die(f"{name} is missing: pip install {name}")


def segment_chinese(line):
    return " ".join(import_package("jieba").cut(line))


def tokenize_block(lang, lines, lowercase):
    tokenizer = _tokenizers.setdefault(lang, MosesTokenizer(lang))
    lines = (line.lower() if lowercase else line for line in lines)
    lines = map(segment_chinese, lines) if lang == "zh" else lines
    return [" ".join(tokenizer.tokenize(line, return_str=True).split()) for line in lines]


def lower_pairs(langs, pairs, lowercase):
    return [tuple(map(str.lower, pair)) for pair in pairs] if lowercase else pairs


def tokenize_pairs(langs, pairs, lowercase):
    return list(zip(*(tokenize_block(lang, side, lowercase) for lang, side in zip(langs, zip(*pairs)))))


def apply_block(lines):
    tags = [TAG.match(line) for line in lines]
    return [tag[0] + _cut(line[tag.end() :]) if tag else _cut(line) for tag, line in zip(tags, lines)]


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
    plain = args.bpe == "sentencepiece"  # words are nothing to it
    files = [open(os.path.join(tmp, f"{split}.tok.{lang}"), "w", encoding="utf-8") for lang in langs]
    with files[0], files[1]:
        for block in spread(lower_pairs if plain else tokenize_pairs, jobs, args.workers):
            ticker.add(len(block))
            for pair in block:
                if split == "train" and not plain and not fits(pair, args.max_words):
                    dropped += 1
                    continue
                kept += 1
                for stream, line in zip(files, pair):
                    print(line, file=stream)
    return kept, dropped


def learn(args, langs, code):
    """Learn merges on the tokenised training text of ``langs``, and write them to ``code``."""
    words, tmp = Counter(), os.path.dirname(code)
    for lang in langs:
        for line in read_lines(os.path.join(tmp, f"train.tok.{lang}")):
            words.update(TAG.sub("", line, 1).split())
    print(f"  learning {args.merges:,} merges from {len(words):,} distinct words of {' and '.join(langs)}", flush=True)
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(words.items())))
    with open(code, "w", encoding="utf-8") as stream, redirect_stderr(io.StringIO()):
        learn_bpe(vocabulary, stream, args.merges, is_dict=True)


def learn_pieces(args, langs, model):
    """Learn a vocabulary of ``args.merges`` pieces on the training text of all ``langs``."""
    spm = import_package("sentencepiece")
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
        die(f"SentencePiece learns no {args.merges:,} pieces from this text: {str(problem).splitlines()[-1]}")


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
    jobs = ((block,) for block in blocks(read_lines(tokenised)))
    ticker = Ticker(f"sub-words of {split}.{lang}")
    with open(os.path.join(tmp, f"{split}.{lang}"), "w", encoding="utf-8") as stream:
        for block in spread(apply_block, jobs, args.workers, load_merges, (code,)):
            ticker.add(len(block))
            stream.writelines(line + "\n" for line in block)
    os.remove(tokenised)


def drop_long(langs, limit, tmp):
    """Keep the training pairs of at most ``limit`` sub-words a side."""
    paths, dropped, kept = [os.path.join(tmp, f"train.{lang}") for lang in langs], 0, 0
    files = [open(f"{path}.short", "w", encoding="utf-8") for path in paths]
    with files[0], files[1]:
        for pair in zip(*map(read_lines, paths)):
            if all(0 < len(side.split()) <= limit for side in pair):
                kept += 1
                for stream, line in zip(files, pair):
                    print(line, file=stream)
            else:
                dropped += 1
    if not kept:
        die(f"no training pair has 1 to {limit} sub-words a side: see --max-subwords")
    for path in paths:
        os.replace(f"{path}.short", path)
    if dropped:
        print(f"  {dropped:,} training pairs dropped: over {limit} sub-words")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--text", required=True, help="folder with the plain text")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--merges", type=int, required=True)
    parser.add_argument("--bpe", choices=("joint", "per-side", "sentencepiece"), default="joint")
    parser.add_argument("--max-words", type=int, required=True)
    parser.add_argument("--max-subwords", type=int, default=0, help="of a training sentence; 0: any number")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lowercase", action="store_true")
    args = parser.parse_args()
    langs, splits = (args.source_lang, args.target_lang), find_splits(args.text, args.source_lang)
    if "zh" in langs and args.bpe != "sentencepiece":
        import_package("jieba").setLogLevel("WARNING")
        segment_chinese("")  # reads its dictionary, once for all processes
    with replaced_folder(args.out) as tmp:
        for split in splits:
            kept, dropped = tokenize_split(args, split, tmp)
            if split == "train" and not kept:
                die(f"no training pair has 1 to {args.max_words} words a side: see --max-words")
            if dropped:
                reason = f"over {args.max_words} words or a length ratio over {MAX_RATIO}"
                print(f"  {dropped:,} training pairs dropped: {reason}")
        codes = learn_codes(args, langs, tmp)
        tokenizer = "none" if args.bpe == "sentencepiece" else "moses"
        with open(os.path.join(tmp, "steps.json"), "w", encoding="utf-8") as stream:  # for fairseq-deep translate
            json.dump({"tokenizer": tokenizer, "lowercase": args.lowercase}, stream)
        for split in splits:
            for lang, code in zip(langs, codes):
                apply_split(args, split, lang, code, tmp)
        if args.max_subwords:
            drop_long(langs, args.max_subwords, tmp)


if __name__ == "__main__":
    run(main)
