"""Combination of many language pairs to one text, and separation of its translations, for the corpus OPUS-100.

The corpus is a directory with supervised/XX-YY/opus.XX-YY-{train,dev,test}.LANG and
zero-shot/XX-YY/opus.XX-YY-test.LANG. Each pair is used in both directions. Sources begin with the tag of the target
language, <2xx>. Small pairs are repeated until sizes are proportional to their original values raised to 1/T, with
temperature T. ``pairs.json`` maps lines of the test set to directions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import read_json
from fairseq_deep.runtime.records import PAIRS

from .corpus import SPLITS, Row, describe, in_folder, read_lines, read_rows, replaced_folder, write_rows
from .fetch import Downloads, members

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

ARCHIVE = "https://object.pouta.csc.fi/OPUS-100/v1.0/opus-100-corpus-v1.0.tar.gz"
MEMBER = re.compile(r"(?:.*/)?((?:supervised|zero-shot)/([a-z]+-[a-z]+))/(opus\.\2-(?:train|dev|test)\.[a-z]+)")
SIDES = ("src", "tgt")
VALID_LINES = 100  # per direction; enough to detect a failed run
LONGEST_VALID = 200  # words; longer sentences may not fit into a batch


def unpack(archive: str, out: str) -> None:
    """Extract the corpus from its archive."""
    with replaced_folder(out) as folder:
        for name, content in members(archive):
            if match := MEMBER.fullmatch(name):
                os.makedirs(os.path.join(folder, match[1]), exist_ok=True)
                with open(os.path.join(folder, match[1], match[3]), "wb") as target:
                    shutil.copyfileobj(content, target)


def find_pairs(data: str, kind: str) -> dict[str, str]:
    """Return {pair: its directory} of *kind*, supervised or zero-shot."""
    folder = os.path.join(data, kind)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return {name: os.path.join(folder, name) for name in names if re.fullmatch("[a-z]+-[a-z]+", name)}


def read_pair(folder: str, split: str) -> Iterator[Row]:
    """Yield the pairs of lines of a set; none if the language pair does not have this set."""
    pair = os.path.basename(folder)
    paths = in_folder(folder, f"opus.{pair}-{split}", pair.split("-"))
    return read_rows(paths) if any(map(os.path.exists, paths)) else iter(())


def nonempty(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows without an empty side."""
    return filter(all, rows)


def directions(folder: str, rows: Iterator[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield (direction, tagged source and target lines) for both directions of a pair."""
    (one, two), rows = os.path.basename(folder).split("-"), [*rows]
    yield f"{one}-{two}", [(f"<2{two}> {first}", second) for first, second in rows]
    yield f"{two}-{one}", [(f"<2{one}> {second}", first) for first, second in rows]


def train_rows(folders: list[str], temperature: float) -> Iterator[Row]:
    """Yield the training text pair by pair; the first pass determines the sizes."""
    sizes = {folder: sum(1 for _ in nonempty(read_pair(folder, "train"))) for folder in folders}
    largest = max(sizes.values())
    for folder, size in sizes.items():
        wanted = max(size, round(largest * (size / largest) ** (1 / temperature))) if size else 0
        for _, rows in directions(folder, islice(cycle(nonempty(read_pair(folder, "train"))), wanted)):
            yield from rows


def valid_rows(folders: list[str]) -> Iterator[Row]:
    """Yield the beginning of each validation set, without long sentences."""
    for folder in folders:
        rows = nonempty(read_pair(folder, "dev"))
        short = (row for row in rows if max(len(side.split()) for side in row) <= LONGEST_VALID)
        for _, tagged in directions(folder, islice(short, VALID_LINES)):
            yield from tagged


def prepare(plan: Plan) -> None:
    """Write the text of all pairs; without ``--data``, the corpus is downloaded."""
    data = plan.options.data or plan.path("corpus")
    if not plan.options.data:
        archive = Downloads(plan).get(ARCHIVE)
        print("  unpacking", flush=True)
        unpack(archive, data)
    folders, others = ([*find_pairs(data, kind).values()] for kind in ("supervised", "zero-shot"))
    if not folders:
        raise UsageError(f"{data} has no supervised/XX-YY: give the directory of OPUS-100, or one with its layout")
    tests = [
        test for folder in (*folders, *others) for test in directions(folder, read_pair(folder, "test")) if test[1]
    ]
    rows = {"train": train_rows(folders, float(plan.options.temperature)), "valid": valid_rows(folders),
            "test": chain.from_iterable(lines for _, lines in tests)}  # fmt: skip
    with replaced_folder(plan.path("text", "raw")) as out:
        counts = {split: Counter(pairs=write_rows(in_folder(out, split, SIDES), rows[split])) for split in SPLITS}
        for split, found in counts.items():
            if not found["pairs"]:
                raise UsageError(f"{data} has no {'dev' if split == 'valid' else split} sets: give a complete corpus")
        with open(os.path.join(out, "pairs.json"), "w", encoding="utf-8") as stream:
            json.dump([[name, len(lines)] for name, lines in tests], stream)
        describe(out, SIDES, counts, plan.options.data or "download")
    print(f"  {len(folders)} training pairs, {len(tests)} directions to test")


def split_translations(output: str, text: str, folder: str) -> None:
    """Write test.SRC-TGT.hyp and .ref per direction, and test.hyp.tgt and test.ref.tgt of all directions."""
    from fairseq_deep.tools.generated import best, read_generated

    tests = read_json(os.path.join(text, "pairs.json"), PAIRS)
    found = read_generated(output)
    hypotheses = [best(found[number]) for number in sorted(found) if "H" in found[number]]
    references = [*read_lines(os.path.join(text, "test.tgt"))]
    if len(hypotheses) != len(references) or len(references) != sum(count for _, count in tests):
        counts = f"{len(hypotheses)} translations of {len(references)} sentences"
        raise UsageError(f"{output} has {counts}: translate again, with --stage 6")
    rows = zip(hypotheses, references)
    with replaced_folder(folder) as out:
        for name, count in tests:
            write_rows(in_folder(out, f"test.{name}", ("hyp", "ref")), islice(rows, count))
    home = os.path.dirname(output)
    write_rows([os.path.join(home, f"test.{kind}.tgt") for kind in ("hyp", "ref")], zip(hypotheses, references))
