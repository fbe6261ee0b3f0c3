"""Extraction and checks of Google's WMT16 archive, which contains tokenised text in sub-words."""

import os
import re

from fairseq_deep.errors import UsageError

from .corpus import copy_pairs, describe, read_lines, replaced_folder
from .fetch import extract, find_fault

SETS = {
    "train": "train.tok.clean.bpe.32000",
    "valid": "newstest2013.tok.bpe.32000",
    "test": "newstest2014.tok.bpe.32000",
}
PLAIN = {"valid": "newstest2013", "test": "newstest2014"}


def parse_lines(text):
    """Parse ``train=A-B,test=N`` to ``{"train": (A, B), "test": (N, N)}``."""
    wanted = {}
    for part in filter(None, text.split(",")):
        split, _, numbers = part.partition("=")
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", numbers)
        if split not in SETS or not found:
            raise UsageError(
                f"--data-lines must be SET=N or SET=MIN-MAX for train, valid, test, separated by commas, not '{text}'"
            )
        wanted[split] = (int(found[1]), int(found[2] or found[1]))
    return wanted


def copy_sets(tar, folder, langs, wanted):
    """Copy the sets of the archive with normalised white space, since some readers treat a lone CR as a line end."""
    names = {f"{prefix}.{lang}": f"{prefix}.{lang}" for prefix in SETS.values() for lang in langs}
    missing = extract(tar, names, folder)
    if missing:
        raise UsageError(f"--data-tar {tar} lacks {', '.join(sorted(missing))}")
    counts = {}
    for split, prefix in SETS.items():
        paths = [os.path.join(folder, f"{prefix}.{lang}") for lang in langs]
        pairs, _ = copy_pairs(paths, [os.path.join(folder, f"{split}.{lang}") for lang in langs], keep_empty=True)
        for path in paths:
            os.remove(path)
        low, high = wanted.get(split, (1, pairs))
        if not low <= pairs <= high:
            raise UsageError(
                f"{prefix} has {pairs} lines, not {low}{f' to {high}' if high > low else ''}:"
                " give the right archive, or accept it with --data-lines ''"
            )
        counts[split] = (pairs, 0)
    return counts


def unpack_plain(tar, out, langs, counts):
    """Extract the untokenised evaluation sets, for references, if the archive contains them."""
    with replaced_folder(os.path.join(out, "raw")) as raw:
        for split, prefix in PLAIN.items():
            names = {f"{split}.{lang}": f"{prefix}.{lang}" for lang in langs}
            missing = extract(tar, names, raw)
            for name in set(names) - set(missing):
                path = os.path.join(raw, name)
                lines = list(read_lines(path))
                if len(lines) != counts[split][0]:
                    os.remove(path)
                    continue
                with open(path, "w", encoding="utf-8") as stream:
                    stream.writelines(f"{line}\n" for line in lines)


def unpack(plan):
    """Write the archive's sub-words and, if it contains them, untokenised sets."""
    options, langs, wanted = plan.options, plan.langs, parse_lines(plan.options.data_lines)
    problem = find_fault(options.data_tar, options.data_sha256)
    if problem:
        raise UsageError(f"--data-tar {options.data_tar}: {problem}; download the file again")
    with replaced_folder(plan.path("text", "bpe")) as tmp:
        counts = copy_sets(options.data_tar, tmp, langs, wanted)
        describe(tmp, langs, counts, os.path.basename(options.data_tar))
    unpack_plain(options.data_tar, plan.path("text"), langs, counts)
