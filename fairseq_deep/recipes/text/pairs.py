"""Combination of many language pairs to one text, and separation of its translations, for the corpus OPUS-100.

The corpus is a directory with supervised/XX-YY/opus.XX-YY-{train,dev,test}.LANG and
zero-shot/XX-YY/opus.XX-YY-test.LANG. Each pair is used in both directions. Sources begin with the tag of the target
language, <2xx>. Small pairs are repeated until sizes are proportional to their original values raised to 1/T, with
temperature T. ``pairs.json`` maps lines of the test set to directions.
"""

import json
import os
import re
import shutil
import tarfile

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import read_json
from fairseq_deep.runtime.records import PAIRS

from .corpus import SPLITS, describe, pair_writers, read_lines, replaced_folder
from .fetch import fetch, read_checksums

ARCHIVE = "https://object.pouta.csc.fi/OPUS-100/v1.0/opus-100-corpus-v1.0.tar.gz"
MEMBER = re.compile(r"(?:.*/)?(supervised|zero-shot)/([a-z]+-[a-z]+)/(opus\.\2-(train|dev|test)\.[a-z]+)")
SIDES = ("src", "tgt")
VALID_LINES = 100  # per direction; enough to detect a failed run
LONGEST_VALID = 200  # words; longer sentences may not fit into a batch


def unpack(archive, out):
    """Extract the corpus from its archive."""
    with replaced_folder(out) as folder, tarfile.open(archive) as stream:
        for entry in stream:
            match = MEMBER.fullmatch(entry.name)
            if match and entry.isfile():
                place = os.path.join(folder, match[1], match[2])
                os.makedirs(place, exist_ok=True)
                with open(os.path.join(place, match[3]), "wb") as target:
                    shutil.copyfileobj(stream.extractfile(entry), target)


def find_pairs(data, kind):
    """Return {pair: its directory} of ``kind``, supervised or zero-shot."""
    folder = os.path.join(data, kind)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return {name: os.path.join(folder, name) for name in names if re.fullmatch("[a-z]+-[a-z]+", name)}


def read_pair(folder, pair, split):
    """Return the pairs of lines of a set; empty if the language pair does not have this set."""
    paths = [os.path.join(folder, f"opus.{pair}-{split}.{lang}") for lang in pair.split("-")]
    if not any(map(os.path.exists, paths)):
        return []
    sides = [list(read_lines(path)) for path in paths]
    if len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"{paths[0]} has {len(sides[0])} lines but {paths[1]} has {len(sides[1])}: give files of equal length"
        )
    return list(zip(*sides))


def directions(pair, lines):
    """Yield (direction, tagged source and target lines) for both directions of a pair."""
    one, two = pair.split("-")
    yield f"{one}-{two}", [(f"<2{two}> {first}", second) for first, second in lines]
    yield f"{two}-{one}", [(f"<2{one}> {second}", first) for first, second in lines]


def repeated(lines, largest, temperature):
    """Repeat ``lines`` to the size for a corpus in which the largest pair has ``largest`` lines."""
    wanted = round(largest * (len(lines) / largest) ** (1 / temperature))
    return [lines[number % len(lines)] for number in range(max(wanted, len(lines)))] if lines else []


def chosen_valid(lines):
    fitting = (pair for pair in lines if all(pair) and max(len(side.split()) for side in pair) <= LONGEST_VALID)
    return [pair for _, pair in zip(range(VALID_LINES), fitting)]


def prepare(plan):
    """Write the text of all pairs; without ``--data``, the corpus is downloaded."""
    options, data = plan.options, plan.options.data or plan.path("corpus")
    if not options.data:
        sums = {} if options.checksums in ("", "none") else read_checksums(options.checksums)
        name = ARCHIVE.rsplit("/", 1)[-1]
        address = f"{options.data_url.rstrip('/')}/{name}" if options.data_url else ARCHIVE
        archive = fetch(address, name, plan.path("download"), sums)
        print("  unpacking", flush=True)
        unpack(archive, data)
    supervised = find_pairs(data, "supervised")
    if not supervised:
        raise UsageError(f"{data} has no supervised/XX-YY: give the directory of OPUS-100, or one with its layout")
    with replaced_folder(plan.path("text", "raw")) as out:
        paths = {split: [os.path.join(out, f"{split}.{side}") for side in SIDES] for split in SPLITS}
        with pair_writers(paths) as writers:
            write_train(supervised, writers["train"], float(options.temperature))
            tests = write_tests(supervised, find_pairs(data, "zero-shot"), writers)
        for split, writer in writers.items():
            if not writer.count:
                raise UsageError(f"{data} has no {'dev' if split == 'valid' else split} sets: give a complete corpus")
        with open(os.path.join(out, "pairs.json"), "w", encoding="utf-8") as stream:
            json.dump(tests, stream)
        counts = {split: (writer.count, 0) for split, writer in writers.items()}
        describe(out, SIDES, counts, options.data or "download")
        print(f"  {len(supervised)} training pairs, {len(tests)} directions to test")


def write_train(supervised, writer, temperature):
    """Write the training text pair by pair; the first pass determines the sizes."""
    sizes = {pair: len(nonempty(read_pair(folder, pair, "train"))) for pair, folder in supervised.items()}
    for pair, folder in supervised.items():
        lines = repeated(nonempty(read_pair(folder, pair, "train")), max(sizes.values()), temperature)
        for _, tagged in directions(pair, lines):
            writer.add_all(tagged)


def write_tests(supervised, zero_shot, writers):
    """Write the validation and test text; return [name, number of lines] of each test."""
    tests = []
    for pair, folder in (*supervised.items(), *zero_shot.items()):
        valid = chosen_valid(read_pair(folder, pair, "dev")) if folder == supervised.get(pair) else []
        for _, lines in directions(pair, valid):
            writers["valid"].add_all(lines)
        for name, lines in directions(pair, read_pair(folder, pair, "test")):
            writers["test"].add_all(lines)
            tests += [[name, len(lines)]] if lines else []
    return tests


def nonempty(lines):
    return [pair for pair in lines if all(pair)]


def split_translations(output, text, folder):
    """Write test.SRC-TGT.hyp and .ref per direction, and test.hyp.tgt and test.ref.tgt of all directions."""
    from fairseq_deep.tools.generated import best, read_generated

    tests = read_json(os.path.join(text, "pairs.json"), PAIRS)
    found = read_generated(output)
    hypotheses = [best(found[number]) for number in sorted(found) if "H" in found[number]]
    references = list(read_lines(os.path.join(text, "test.tgt")))
    if len(hypotheses) != len(references) or len(references) != sum(count for _, count in tests):
        counts = f"{len(hypotheses)} translations of {len(references)} sentences"
        raise UsageError(f"{output} has {counts}: translate again, with --stage 6")
    begin = 0
    with replaced_folder(folder) as out:
        for name, count in tests:
            for kind, lines in (("hyp", hypotheses), ("ref", references)):
                write_lines(os.path.join(out, f"test.{name}.{kind}"), lines[begin : begin + count])
            begin += count
    home = os.path.dirname(output)
    write_lines(os.path.join(home, "test.hyp.tgt"), hypotheses)
    write_lines(os.path.join(home, "test.ref.tgt"), references)


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
