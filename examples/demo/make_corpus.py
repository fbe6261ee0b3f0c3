#!/usr/bin/env python3
"""Write the demo corpus: English-German sentence pairs from a hand-written grammar, as DIR/{train,valid,test}.{en,de}.

The same arguments give the same bytes on every machine. All pairs are distinct on both sides, so no sentence of the
valid or test set occurs anywhere else. Only the standard library is needed.
"""

import argparse
import errno
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grammar.lexicon import Phrase  # noqa: E402
from grammar.sampling import Sampler  # noqa: E402
from grammar.sentences import sentence  # noqa: E402
from hops import draw_hops  # noqa: E402

MIN_WORDS, MAX_WORDS = 4, 16
MAX_PAIRS = 200_000  # far below what the grammar yields, so that fresh sentences stay easy to draw


def draw_pairs(count: int, seed: int) -> list:
    """Distinct pairs of MIN_WORDS to MAX_WORDS words a side; a sentence of either language occurs once."""
    sampler, pairs, seen = Sampler(seed), [], set()
    while len(pairs) < count:
        pair = sentence(sampler)
        lengths = len(pair.en.split()), len(pair.de.split())
        if min(lengths) < MIN_WORDS or max(lengths) > MAX_WORDS or ("en", pair.en) in seen or ("de", pair.de) in seen:
            continue
        seen.update((("en", pair.en), ("de", pair.de)))
        pairs.append(pair)
    return pairs


def words(lines) -> list:
    """The words of the lines, in lower case and without punctuation."""
    return [word.strip(".,?").lower() for line in lines for word in line.split()]


def table_row(split: str, pairs: list) -> tuple:
    """(split, pairs, English and German tokens, mean English length, distinct words), counted in words."""
    en, de = words(pair.en for pair in pairs), words(pair.de for pair in pairs)
    mean = f"{len(en) / max(len(pairs), 1):.1f}"
    return split, len(pairs), len(en), len(de), mean, f"{len(set(en))} en, {len(set(de))} de"


def print_table(rows: list) -> None:
    """The rows under their heading, in aligned columns."""
    rows = [("split", "pairs", "en tokens", "de tokens", "mean length", "distinct words"), *rows]
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *middle, last = (str(cell) for cell in row)
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells, last]))


def write_corpus(folder: Path, splits: dict) -> None:
    """Write every file under a temporary name first; only when all are complete do they get their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}.{language}" for split in splits for language in Phrase._fields]
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{name} is a folder there")
    with tempfile.TemporaryDirectory(prefix=".corpus-", dir=folder) as scratch:
        for name in names:
            split, language = name.split(".")
            text = "".join(f"{getattr(pair, language)}\n" for pair in splits[split])
            Path(scratch, name).write_bytes(text.encode("utf-8"))
        for name in names:
            os.replace(Path(scratch, name), folder / name)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def parse_args(argv=None) -> argparse.Namespace:
    parser = Parser(prog="make_corpus.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the six files")
    for split, size in (("train", 22000), ("valid", 500), ("test", 500)):
        parser.add_argument(f"--{split}", type=int, default=size, metavar="N", help=f"{split} pairs (default: {size})")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the random draws (default: 1)")
    parser.add_argument(
        "--hops", type=int, default=0, metavar="N", help="instead of sentences, a task that needs depth: 1 to N hops"
    )
    args = parser.parse_args(argv)
    for split in ("train", "valid", "test"):
        if getattr(args, split) < 1:
            parser.error(f"--{split} must be at least 1, not {getattr(args, split)}")
    if args.train + args.valid + args.test > MAX_PAIRS:
        parser.error(f"at most {MAX_PAIRS} pairs in all: lower --train, --valid or --test")
    if args.hops < 0:
        parser.error(f"--hops must not be negative, not {args.hops}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, not {args.seed}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: name a folder")
    return args


def main(argv=None) -> None:
    args = parse_args(argv)
    count = args.test + args.valid + args.train
    pairs = draw_hops(count, args.seed, args.hops) if args.hops else draw_pairs(count, args.seed)
    # Test and valid come first, so that a larger training set leaves them as they are.
    splits = {
        "train": pairs[args.test + args.valid :],
        "valid": pairs[args.test : args.test + args.valid],
        "test": pairs[: args.test],
    }
    try:
        write_corpus(args.out, splits)
    except OSError as error:
        sys.exit(f"make_corpus.py: cannot write {args.out}: {error.strerror}: free the place or name another --out")
    print_table([table_row(split, part) for split, part in splits.items()])


if __name__ == "__main__":
    main()
