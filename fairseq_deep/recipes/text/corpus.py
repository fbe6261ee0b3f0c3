"""Checks a directory of parallel text and copies it with one normalised sentence per line.

Training and validation pairs with an empty side are dropped, but test sets keep all lines. Each run of white space
becomes one blank, so all readers split the text into the same lines. Further test sets are called test1, test2 and so
on, and further references test.TARGET.ref1, test.TARGET.ref2 and so on.
"""

import gzip
import json
import os
import re
import shutil
import zlib
from contextlib import ExitStack, contextmanager
from itertools import zip_longest

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import checksum

SPLITS = ("train", "valid", "test")


def find_text(folder, name):
    """Return the path of ``name`` or ``name.gz`` in ``folder``."""
    for path in (os.path.join(folder, name), os.path.join(folder, name + ".gz")):
        if os.path.isfile(path):
            return path
    raise UsageError(f"{os.path.join(folder, name)} is missing (plain or .gz)")


def decode_lines(stream, name):
    """Yield the lines of a UTF-8 text; ``name`` is used in messages."""
    number, encoding = 0, "utf-8-sig"  # removes the byte order mark that some editors write
    while True:
        try:
            line = stream.readline()
            number += 1
            if not line:
                return
            text = line.decode(encoding)
        except UnicodeDecodeError:
            raise UsageError(f"{name}, line {number}: not UTF-8; convert the file with iconv") from None
        except (EOFError, OSError, zlib.error) as problem:
            raise UsageError(f"{name} cannot be read after line {number}: {problem}; copy the file again") from None
        yield text
        encoding = "utf-8"


def read_lines(path):
    """Yield the lines of a UTF-8 text, plain or gzip; each run of white space becomes one blank."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as stream:
        for line in decode_lines(stream, path):
            yield " ".join(line.split())


def find_splits(folder, lang):
    """Return the names of the sets in ``folder``: train, valid, test and, if they exist, test1, test2 and so on."""
    pattern = re.compile(rf"test([1-9]\d*)\.{re.escape(lang)}(\.gz)?")
    found = sorted({int(match[1]) for match in map(pattern.fullmatch, os.listdir(folder)) if match})
    if found != list(range(1, len(found) + 1)):
        raise UsageError(
            f"{folder} has test{found[-1]}.{lang} after a gap: number the test sets test, test1, test2 and so on"
        )
    return (*SPLITS, *(f"test{number}" for number in found))


class PairWriter:
    """Writes pairs of lines to two files and counts them."""

    def __init__(self, paths):
        with ExitStack() as opened:
            self.files = [opened.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
            self.count, self._opened = 0, opened.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._opened.close()  # every file, also if one cannot be written

    def add(self, pair):
        self.add_all([pair])

    def add_all(self, pairs):
        for pair in pairs:
            for stream, line in zip(self.files, pair):
                stream.write(line + "\n")
            self.count += 1


@contextmanager
def pair_writers(paths):
    """Yield {name: `PairWriter`} for ``paths``, {name: paths of its files}."""
    with ExitStack() as opened:
        yield {name: opened.enter_context(PairWriter(each)) for name, each in paths.items()}


def copy_pairs(paths, targets, keep_empty):
    """Copy two aligned texts; return (pairs written, pairs dropped)."""
    counts, dropped = [0, 0], 0
    with PairWriter(targets) as writer:
        for pair in zip_longest(*map(read_lines, paths)):
            counts = [n + (line is not None) for n, line in zip(counts, pair)]
            if counts[0] != counts[1]:
                continue
            if keep_empty or all(pair):
                writer.add(pair)
            else:
                dropped += 1
    if counts[0] != counts[1]:
        raise UsageError(
            f"{paths[0]} has {counts[0]} lines but {paths[1]} has {counts[1]}: give files of equal length"
        )
    return writer.count, dropped


class replaced_folder:
    """Context manager that yields a temporary directory and renames it to ``out`` if no exception occurs."""

    def __init__(self, out):
        self.out, self.tmp = out, out + ".new"

    def __enter__(self):
        shutil.rmtree(self.tmp, ignore_errors=True)
        os.makedirs(self.tmp)
        return self.tmp

    def __exit__(self, kind, *_):
        if kind is None:
            shutil.rmtree(self.out, ignore_errors=True)
            os.rename(self.tmp, self.out)
        else:
            shutil.rmtree(self.tmp, ignore_errors=True)


def find_references(data, split, lang):
    """Return the names, without .gz, of further references of a test set; test.LANG is the first reference."""
    pattern = re.compile(rf"{split}\.{re.escape(lang)}\.ref(\d+)(\.gz)?")
    found = {match[1] for match in map(pattern.fullmatch, os.listdir(data)) if match}
    wanted = [str(number) for number in range(1, len(found) + 1)]
    odd = sorted(found - set(wanted))
    if odd:
        path = os.path.join(data, f"{split}.{lang}.ref{odd[0]}")
        raise UsageError(
            f"{path}: number the references {split}.{lang}, {split}.{lang}.ref1, {split}.{lang}.ref2 and so on"
        )
    return [f"{split}.{lang}.ref{number}" for number in wanted]


def copy_references(data, out, split, lang, sentences):
    """Copy the further references of a test set, and return their names."""
    names = find_references(data, split, lang)
    for name in names:
        path, count = find_text(data, name), 0
        with open(os.path.join(out, name), "w", encoding="utf-8") as stream:
            for line in read_lines(path):
                print(line, file=stream)
                count += 1
        if count != sentences:
            raise UsageError(
                f"{path} has {count} lines, but the {split} set {sentences}: give one line per sentence"
            )
    return names


def describe(folder, langs, counts, route, references=None):
    """Write ``data.json`` (route, pairs, checksums) to ``folder`` and print the counts."""
    sets = {}
    for split, (written, dropped) in counts.items():
        sums = {lang: checksum(os.path.join(folder, f"{split}.{lang}")) for lang in langs}
        sets[split] = {"pairs": written, "dropped": dropped, "sha256": sums}
        note = f"  (dropped {dropped:,} with an empty side)" if dropped else ""
        print(f"  {split:5} {written:>9,} pairs{note}")
    for split, names in (references or {}).items():
        print(f"  {split:9} {len(names) + 1} references per sentence")
        sets[split]["references"] = {name: checksum(os.path.join(folder, name)) for name in names}
    with open(os.path.join(folder, "data.json"), "w", encoding="utf-8") as stream:
        json.dump({"route": route, "sets": sets}, stream, indent=1)


def copy_corpus(data, out, langs, route):
    counts, references = {}, {}
    with replaced_folder(out) as tmp:
        for split in find_splits(data, langs[0]):
            paths = [find_text(data, f"{split}.{lang}") for lang in langs]
            targets = [os.path.join(tmp, f"{split}.{lang}") for lang in langs]
            test = split.startswith("test")
            counts[split] = copy_pairs(paths, targets, keep_empty=test)
            if not counts[split][0]:
                raise UsageError(f"{paths[0]} and {paths[1]} have no sentence pairs: give a {split} set")
            names = copy_references(data, tmp, split, langs[1], counts[split][0]) if test else []
            references.update({split: names} if names else {})
        same = refuse_one_text(tmp, langs, data)
        describe(tmp, langs, counts, route, references)
        print_notes(tmp, langs, same)


def refuse_one_text(folder, langs, data):
    """Reject a set with the same text on both sides, and return the share of identical pairs per set."""
    shares = {}
    for split in find_splits(folder, langs[0]):
        pairs = zip(*(read_lines(os.path.join(folder, f"{split}.{lang}")) for lang in langs))
        equal = [source == target for source, target in pairs]
        shares[split] = sum(equal) / len(equal)
        if all(equal) and len(equal) > 1:
            raise UsageError(
                f"{data}: {split}.{langs[0]} and {split}.{langs[1]} have the same text: replace the wrong file"
            )
    return shares


def print_notes(folder, langs, same):
    """Print notes on data that make scores less meaningful: identical sides, and test sources in the training set."""
    if same["train"] >= 0.01:
        print(f"  note: {100 * same['train']:.0f} % of the training pairs have the same text on both sides")
    splits = find_splits(folder, langs[0])
    lines = {split: read_lines(os.path.join(folder, f"{split}.{langs[0]}")) for split in splits}
    held_out = {split: [line for line in lines[split] if line] for split in splits[1:]}
    wanted = set().union(*held_out.values())
    seen = {line for line in lines["train"] if line in wanted}
    for split, sources in held_out.items():
        count = sum(line in seen for line in sources)
        if count:
            print(f"  note: {count:,} of {len(sources):,} {split} sources are also training sources")


def check_folder(plan):
    """Reject a ``--data`` directory that lacks a text, or is the experiment's own copy of the text."""
    options, data = plan.options, plan.options.data
    if options.multilingual:
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
    for split in splits:
        for lang in plan.langs:
            if not any(os.path.isfile(os.path.join(data, f"{split}.{lang}{end}")) for end in ("", ".gz")):
                raise UsageError(
                    f"{data}/{split}.{lang} is missing: --data requires {{{','.join(splits)}}}"
                    f".{{{','.join(plan.langs)}}}, "
                    f"plain or .gz (test sets as in --subsets){_languages_there(data, plan.langs)}"
                )


def _languages_there(data, langs):
    """Return a note on languages of the training text in *data* other than *langs*; empty if there are none."""
    found = [re.fullmatch(r"train\.([a-z]{2,3}([_-][A-Za-z]+)?)(\.gz)?", name) for name in sorted(os.listdir(data))]
    other = [match[1] for match in found if match and match[1] not in langs]
    return f"; it has {' '.join(other)}: give --source-lang and --target-lang" if other else ""


def check_lengths(folder, langs, max_tokens, positions):
    """Reject sentences that are too long for training, validation or translation, before these start.

    Args:
        max_tokens: maximum number of sub-words in a batch, including the end symbol
        positions: number of the model's positions, by language; fairseq skips longer training pairs
    """
    for split in find_splits(folder, langs[0]):
        for lang in langs:
            limit = positions[lang] if split.startswith("test") else max_tokens
            limit = min(limit, positions[lang]) if split == "valid" else limit
            path = os.path.join(folder, f"{split}.{lang}")
            lengths = [1 + len(line.split()) for line in read_lines(path)]
            longest = max(lengths)
            if longest > limit:
                side = "source" if lang == langs[0] else "target"
                cures = {max_tokens: "raise --max-tokens", positions[lang]: f"raise --max-{side}-positions (after --)"}
                cure = cures[limit] + (", or set --max-words lower" if split == "train" else ", or shorten the line")
                raise UsageError(
                    f"{split}.{lang}, line {1 + lengths.index(longest)}: the longest sentence has {longest} sub-words, "
                    f"more than {limit}: {cure}"
                )
