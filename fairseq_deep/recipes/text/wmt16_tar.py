"""Extraction and checks of Google's WMT16 archive, which contains tokenised text in sub-words."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError

from .corpus import describe, in_folder, read_rows, replaced_folder, write_rows
from .fetch import extract, find_fault

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

SETS = {"train": "train.tok.clean", "valid": "newstest2013.tok", "test": "newstest2014.tok"}
"""Names of the sets in the archive, before ".bpe.32000"; the evaluation sets also exist untokenised."""


def parse_lines(text: str) -> dict[str, tuple[int, int]]:
    """Parse ``train=A-B,test=N`` to ``{"train": (A, B), "test": (N, N)}``."""
    wanted = {}
    for part in filter(None, text.split(",")):
        found = re.fullmatch(rf"({'|'.join(SETS)})=([0-9]+)(?:-([0-9]+))?", part)
        if not found:
            raise UsageError(
                f"--data-lines must be SET=N or SET=MIN-MAX for train, valid, test, separated by commas, not '{text}'"
            )
        wanted[found[1]] = (int(found[2]), int(found[3] or found[2]))
    return wanted


def unpack(plan: Plan) -> None:
    """Write the archive's sub-words and, if it contains them, untokenised sets, which are references.

    White space is normalised, since some readers treat a lone CR as a line end.

    Raises:
        UsageError: the archive is not the expected one
    """
    tar, langs, wanted = plan.options.data_tar, plan.langs, parse_lines(plan.options.data_lines)
    if problem := find_fault(tar, plan.options.data_sha256):
        raise UsageError(f"--data-tar {tar}: {problem}; download the file again")
    bpe = {f"{split}.{lang}": f"{name}.bpe.32000.{lang}" for split, name in SETS.items() for lang in langs}
    plain = {
        f"{name}.raw": member.replace(".tok.bpe.32000", "") for name, member in bpe.items() if "newstest" in member
    }
    with replaced_folder(plan.path("text", "bpe")) as out, tempfile.TemporaryDirectory(dir=out) as work:
        missing = extract(tar, bpe | plain, work)
        if lacking := [bpe[name] for name in missing if name in bpe]:
            raise UsageError(f"--data-tar {tar} lacks {', '.join(sorted(lacking))}")
        counts = {}
        for split, name in SETS.items():
            pairs = write_rows(in_folder(out, split, langs), read_rows(in_folder(work, split, langs)))
            low, high = wanted.get(split, (1, pairs))
            if not low <= pairs <= high:
                span = f"{low} to {high}" if high > low else low
                raise UsageError(f"{name}.bpe.32000 has {pairs} lines, not {span}: give the right archive, or accept "
                                 "it with --data-lines ''")  # fmt: skip
            counts[split] = Counter(pairs=pairs)
        describe(out, langs, counts, os.path.basename(tar))
        with replaced_folder(plan.path("text", "raw")) as raw:
            for name in plain.keys() - missing:
                rows = [*read_rows([os.path.join(work, name)])]
                if len(rows) == counts[name.partition(".")[0]]["pairs"]:
                    write_rows([os.path.join(raw, name.removesuffix(".raw"))], rows)
