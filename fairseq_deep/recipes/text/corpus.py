"""Checks a directory of parallel text and copies it with one normalised sentence per line.

Training and validation pairs with an empty side are dropped, but test sets keep all lines. Each run of white space
becomes one blank, so all readers split the text into the same lines. Further test sets are called test1, test2 and so
on, and further references test.TARGET.ref1, test.TARGET.ref2 and so on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import checksum
from fairseq_deep.tools.input_text import iterate_lines

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

SPLITS = ("train", "valid", "test")
Row = tuple[str, ...]
"""Lines of all columns of a text: source, target and further references."""


def find_text(folder: str, name: str) -> str:
    """Return the path of *name* or ``name.gz`` in *folder*."""
    for path in (os.path.join(folder, name), os.path.join(folder, name + ".gz")):
        if os.path.isfile(path):
            return path
    raise UsageError(f"{os.path.join(folder, name)} is missing (plain or .gz)")


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, plain or gzip; each run of white space becomes one blank."""
    for line in iterate_lines(path):
        yield " ".join(line.split())


def aligned(
    columns: Iterable[Iterable[str]], names: Sequence[str], fix: str = "give files of equal length"
) -> Iterator[Row]:
    """Yield the rows of several texts.

    Args:
        names: names of the texts in messages

    Raises:
        UsageError: the texts have different numbers of lines
    """
    columns = [*map(iter, columns)]
    for number, row in enumerate(zip_longest(*columns)):
        if None in row:
            counts = [number + (line is not None) + sum(1 for _ in rest) for line, rest in zip(row, columns)]
            other = next(index for index, count in enumerate(counts) if count != counts[0])
            raise UsageError(f"{names[0]} has {counts[0]} lines but {names[other]} has {counts[other]}: {fix}")
        yield row


def read_rows(paths: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of several files, which must have the same number of lines."""
    return aligned(map(read_lines, paths), paths)


def write_rows(paths: Iterable[str], rows: Iterable[Row]) -> int:
    """Write each column of *rows* to its file, and return the number of rows."""
    count = 0
    with ExitStack() as opened:
        files = [opened.enter_context(open(path, "w", encoding="utf-8", newline="\n")) for path in paths]
        for row in rows:
            count += 1
            for stream, line in zip(files, row):
                stream.write(line + "\n")
    return count


def in_folder(folder: str, split: str, langs: Iterable[str]) -> list[str]:
    """Return the paths of a set."""
    return [os.path.join(folder, f"{split}.{lang}") for lang in langs]


def _numbered(folder: str, stem: str, end: str, fix: str) -> list[str]:
    """Return the names STEM1END, STEM2END and so on of the texts in *folder*, plain or .gz.

    Raises:
        UsageError: a number is missing or odd, such as 01
    """
    pattern = re.compile(rf"{re.escape(stem)}(\d+){re.escape(end)}(\.gz)?")
    found = {match[1] for match in map(pattern.fullmatch, os.listdir(folder)) if match}
    wanted = [str(number) for number in range(1, len(found) + 1)]
    if odd := sorted(found - set(wanted)):
        raise UsageError(f"{os.path.join(folder, stem + odd[0] + end)}: {fix}, without a gap")
    return [stem + number for number in wanted]


def find_splits(folder: str, lang: str) -> list[str]:
    """Return the names of the sets in *folder*: train, valid, test and, if they exist, test1, test2 and so on."""
    fix = "number the test sets test, test1, test2 and so on"
    return [*SPLITS, *_numbered(folder, "test", f".{lang}", fix)]


def find_references(folder: str, split: str, lang: str) -> list[str]:
    """Return the names, without .gz, of further references of a test set; test.LANG is the first reference."""
    if not split.startswith("test"):
        return []
    name = f"{split}.{lang}"
    return _numbered(folder, f"{name}.ref", "", f"number the references {name}, {name}.ref1, {name}.ref2 and so on")


@contextmanager
def replaced_folder(out: str) -> Iterator[str]:
    """Yield a temporary directory, which replaces *out* if no exception occurs."""
    tmp = out + ".new"
    shutil.rmtree(tmp, ignore_errors=True)
    os.makedirs(tmp)
    try:
        yield tmp
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    shutil.rmtree(out, ignore_errors=True)
    os.rename(tmp, out)


def copy_corpus(data: str, out: str, langs: Sequence[str], route: str) -> None:
    """Copy all sets of *data* to *out*, with checks, notes and ``data.json``.

    Raises:
        UsageError: a set is missing or empty, its sides differ in length, or have the same text
    """
    with replaced_folder(out) as tmp:
        counts = {split: _copy_set(data, tmp, split, langs) for split in find_splits(data, langs[0])}
        describe(tmp, langs, counts, route)
        pairs, same = counts["train"]["pairs"], counts["train"]["same"]
        if 100 * same >= pairs:
            print(f"  note: {100 * same / pairs:.0f} % of the training pairs have the same text on both sides")
        _note_overlap(tmp, langs[0], [*counts][1:])


def _copy_set(data: str, out: str, split: str, langs: Sequence[str]) -> Counter:
    """Copy a set with its references, and return the numbers of its pairs, "dropped" and "same" on both sides."""
    names = [f"{split}.{lang}" for lang in langs] + find_references(data, split, langs[1])
    paths, counts, test = [find_text(data, name) for name in names], Counter(), split.startswith("test")

    def kept() -> Iterator[Row]:
        for row in read_rows(paths):
            if test or all(row):
                counts["same"] += row[0] == row[1]
                yield row
            else:
                counts["dropped"] += 1

    counts["pairs"] = write_rows([os.path.join(out, name) for name in names], kept())
    if not counts["pairs"]:
        raise UsageError(f"{paths[0]} and {paths[1]} have no sentence pairs: give a {split} set")
    if counts["same"] == counts["pairs"] > 1:
        raise UsageError(f"{data}: {names[0]} and {names[1]} have the same text: replace the wrong file")
    return counts


def describe(folder: str, langs: Sequence[str], counts: dict[str, Counter], route: str) -> None:
    """Write ``data.json`` (route, pairs, checksums) to *folder* and print the counts.

    Args:
        counts: "pairs" and "dropped" of each set
    """
    sets = {}
    for split, found in counts.items():
        sums = {lang: checksum(path) for lang, path in zip(langs, in_folder(folder, split, langs))}
        sets[split] = {"pairs": found["pairs"], "dropped": found["dropped"], "sha256": sums}
        note = f"  (dropped {found['dropped']:,} with an empty side)" if found["dropped"] else ""
        references = {name: checksum(os.path.join(folder, name)) for name in find_references(folder, split, langs[1])}
        if references:
            sets[split]["references"] = references
            note += f"  ({len(references) + 1} references per sentence)"
        print(f"  {split:5} {found['pairs']:>9,} pairs{note}")
    with open(os.path.join(folder, "data.json"), "w", encoding="utf-8") as stream:
        json.dump({"route": route, "sets": sets}, stream, indent=1)


def _note_overlap(folder: str, lang: str, splits: Sequence[str]) -> None:
    """Print how many sources of the sets *splits* are also training sources, which makes scores less meaningful."""
    held_out = {split: [*filter(None, read_lines(os.path.join(folder, f"{split}.{lang}")))] for split in splits}
    wanted = set().union(*held_out.values())
    seen = {line for line in read_lines(os.path.join(folder, f"train.{lang}")) if line in wanted}
    for split, sources in held_out.items():
        count = sum(line in seen for line in sources)
        if count:
            print(f"  note: {count:,} of {len(sources):,} {split} sources are also training sources")


def check_folder(plan: Plan) -> None:
    """Reject a ``--data`` directory that lacks a text, or is the experiment's own copy of the text."""
    data = plan.options.data
    if plan.options.multilingual:
        if not os.path.isdir(os.path.join(data, "supervised")):
            raise UsageError(f"--data {data} must have subdirectories supervised/XX-YY, like OPUS-100")
        return
    if not os.path.isdir(data):
        raise UsageError(f"--data {data}: no such directory; correct the path")
    own = os.path.realpath(plan.path("text"))
    if os.path.isdir(own) and (os.path.realpath(data) + os.sep).startswith(own + os.sep):
        raise UsageError(
            f"--data {data} must not be the copy of the text in --exp {plan.exp}: give the original directory"
        )
    splits = sorted({*SPLITS, *plan.subsets})
    try:
        for split in splits:
            for lang in plan.langs:
                find_text(data, f"{split}.{lang}")
    except UsageError as error:
        wanted = f"{{{','.join(splits)}}}.{{{','.join(plan.langs)}}}"
        raise UsageError(
            f"{error.message}: --data requires {wanted} (test sets as in --subsets){_languages_there(data, plan.langs)}"
        ) from None


def _languages_there(data: str, langs: Sequence[str]) -> str:
    """Return a note on languages of the training text in *data* other than *langs*; empty if there are none."""
    found = [re.fullmatch(r"train\.([a-z]{2,3}([_-][A-Za-z]+)?)(\.gz)?", name) for name in sorted(os.listdir(data))]
    other = [match[1] for match in found if match and match[1] not in langs]
    return f"; it has {' '.join(other)}: give --source-lang and --target-lang" if other else ""


def check_lengths(folder: str, langs: Sequence[str], max_tokens: int, positions: dict[str, int]) -> None:
    """Reject sentences that are too long for training, validation or translation, before these start.

    Args:
        max_tokens: maximum number of sub-words in a batch, including the end symbol
        positions: number of the model's positions, by language; fairseq skips longer training pairs
    """
    for split in find_splits(folder, langs[0]):
        for lang, path in zip(langs, in_folder(folder, split, langs)):
            limit = positions[lang] if split.startswith("test") else max_tokens
            limit = min(limit, positions[lang]) if split == "valid" else limit
            lengths = [1 + len(line.split()) for line in read_lines(path)]
            longest = max(lengths)
            if longest > limit:
                side = "source" if lang == langs[0] else "target"
                cures = {max_tokens: "raise --max-tokens", positions[lang]: f"raise --max-{side}-positions (after --)"}
                other = f"set --max-subwords {limit - 1}" if split == "train" else "shorten the line"
                raise UsageError(
                    f"{split}.{lang}, line {1 + lengths.index(longest)}: the longest sentence has {longest} sub-words, "
                    f"more than {limit}: {cures[limit]}, or {other}"
                )
