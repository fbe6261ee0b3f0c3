"""Unpack and check Google's pre-processed WMT16 archive, whose text is tokenised and cut into sub-words already."""

import argparse
import os

from corpus import describe, die, read_lines, replaced_folder, run
from fetch import extract, find_fault

SETS = {
    "train": "train.tok.clean.bpe.32000",
    "valid": "newstest2013.tok.bpe.32000",
    "test": "newstest2014.tok.bpe.32000",
}
PLAIN = {"valid": "newstest2013", "test": "newstest2014"}


def parse_lines(text):
    """Turn ``train=A-B,test=N`` into ``{"train": (A, B), "test": (N, N)}``."""
    wanted = {}
    for part in filter(None, text.split(",")):
        split, _, numbers = part.partition("=")
        low, _, high = numbers.partition("-")
        if split not in SETS or not (low + high).isdigit():
            die(f"--data-lines '{text}': give SET=N or SET=LEAST-MOST for train, valid, test, separated by commas")
        wanted[split] = (int(low), int(high or low))
    return wanted


def check_counts(folder, langs, wanted):
    counts = {}
    for split in SETS:
        both = [sum(1 for _ in read_lines(os.path.join(folder, f"{split}.{lang}"))) for lang in langs]
        if both[0] != both[1]:
            die(f"{SETS[split]}.{langs[0]} has {both[0]} lines but {SETS[split]}.{langs[1]} has {both[1]}")
        low, high = wanted.get(split, (1, both[0]))
        if not low <= both[0] <= high:
            die(
                f"{SETS[split]} has {both[0]} lines, not {low}{f' to {high}' if high > low else ''}:"
                " another archive? (--data-lines '' takes it all the same)"
            )
        counts[split] = (both[0], 0)
    return counts


def unpack_plain(tar, out, langs, counts):
    """Extract the untokenised evaluation sets, for references, if the archive holds them."""
    with replaced_folder(os.path.join(out, "raw")) as raw:
        for split, prefix in PLAIN.items():
            names = {f"{split}.{lang}": f"{prefix}.{lang}" for lang in langs}
            missing = extract(tar, names, raw)
            for name in set(names) - set(missing):
                lines = list(read_lines(os.path.join(raw, name)))
                if len(lines) != counts[split][0]:
                    os.remove(os.path.join(raw, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--tar", required=True)
    parser.add_argument("--out", required=True, help="folder for bpe/ and, where there is plain text, raw/")
    parser.add_argument("--sha256", default="")
    parser.add_argument("--lines", default="", help="SET=N or SET=LEAST-MOST, separated by commas")
    args = parser.parse_args()
    langs = (args.source_lang, args.target_lang)
    wanted = parse_lines(args.lines)
    problem = find_fault(args.tar, args.sha256)
    if problem:
        die(f"--data-tar {args.tar}: {problem}; get the file again")
    with replaced_folder(os.path.join(args.out, "bpe")) as tmp:
        names = {f"{split}.{lang}": f"{prefix}.{lang}" for split, prefix in SETS.items() for lang in langs}
        missing = extract(args.tar, names, tmp)
        if missing:
            die(f"--data-tar {args.tar} lacks {', '.join(sorted(names[name] for name in missing))}")
        counts = check_counts(tmp, langs, wanted)
        describe(tmp, langs, counts, os.path.basename(args.tar))
    unpack_plain(args.tar, args.out, langs, counts)


if __name__ == "__main__":
    run(main)
