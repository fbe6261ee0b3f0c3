"""Reconstruction of a corpus from public archives, according to a JSON description in the recipe's directory.

    languages    codes of both languages
    archives     {key: URL}
    train, valid, test, test1, test2 ...
                 lists of parts, concatenated in this order; "valid": {"every": N} uses every Nth training pair;
                 "test1": {"sample": N} copies N training pairs
    like         another description in the same directory; this one overrides its entries

A part is one of these; a name is the end of a path in the archive, with {lang} for the language:

    {"archive": KEY, "text": NAME}    one member per language: plain, .gz, or the segments of .sgm and .xml
    {"archive": KEY, "talks": NAME}   as above, without the mark-up of TED talks
    {"archive": KEY, "table": NAME, "columns": {LANG: NUMBER, ...}}
                                      tab-separated tables with a column per language; NAME may have wildcards;
                                      without NAME, the archive is the (gzip) table itself
    {"sacrebleu": SET}                a test set of sacreBLEU, with its URL and checksum

KEY and NAME may be lists: the first existing one is used. "restore": true detokenises and detruecases a text. All other
keys of descriptions and parts are comments.
"""

import gzip
import html
import json
import os
import re
import tarfile
import tempfile
from itertools import islice, zip_longest

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.options import EXAMPLES

from .corpus import PairWriter, decode_lines, pair_writers, read_lines, replaced_folder
from .fetch import ends_with, extract, fetch, read_checksums

KNOWN = os.path.join(EXAMPLES, "common", "checksums.txt")
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
MARKUP_LINE = re.compile(r"<(url|talkid|keywords|speaker|reviewer|translator)\b")
TITLE = re.compile(r"</?(title|description)>")
SETS = re.compile(r"train|valid|test\d*")


def read_description(path):
    """Return the description in the file ``path``."""
    with open(path, encoding="utf-8") as stream:
        found = json.load(stream)
    if "like" in found:
        found = {**read_description(os.path.join(os.path.dirname(path), found["like"])), **found}
    return found


def as_list(value):
    return value if isinstance(value, list) else [value]


class Archives:
    """The archives of a description, downloaded on first use.

    Args:
        langs: source and target language
        folder, url, checksums: directory for downloads; URL of a directory with all archives, or ""; known checksums

    Attributes:
        work: directory for extracted files
    """

    work = ""

    def __init__(self, addresses, langs, folder, url, checksums):
        self.addresses, self.langs, self.folder, self.url = addresses, langs, folder, url.rstrip("/")
        self.checksums = checksums

    def fetch(self, address, name="", digest=""):
        name = name or address.rsplit("/", 1)[-1]
        known = self.checksums
        if digest and known is not None and not self.url:
            known = {**known, name: digest}
        return fetch(f"{self.url}/{name}" if self.url else address, name, self.folder, known or {})

    def get(self, key):
        return self.fetch(self.addresses[key])

    def of_sacrebleu(self, name):
        """Return the path of a test set, and the names of its two members."""
        from sacrebleu.dataset import DATASETS

        found, pair = DATASETS[name], "-".join(self.langs)
        if pair not in found.langpairs:
            raise UsageError(f"sacreBLEU's {name} has no {pair}: give your own text with --data")
        address = found.data[0]
        # sacreBLEU's archives have the same name in different years
        own = f"{name.replace('/', '-')}-{address.rsplit('/', 1)[-1]}"
        return self.fetch(address, own, found.md5[0] if found.md5 else ""), found.langpairs[pair][:2]

    def members(self, keys, names, what):
        """Extract two aligned members, one per language, and return their paths.

        Args:
            names: possible names per language, in order of preference
        """
        paths = []
        for lang, candidates in zip(self.langs, names):
            ways = {f"{number}.{lang}{os.path.splitext(name)[1]}": name for number, name in enumerate(candidates)}
            for key in keys:
                missing = extract(key, ways, self.work)
                found = [os.path.join(self.work, way) for way in ways if way not in missing]
                if found:
                    paths.append(found[0])
                    break
            else:
                raise UsageError(
                    f"{' and '.join(keys)} lack {what} in '{lang}': delete them and run the same command again"
                )
        return paths


def read_segments(path):
    """Return the segments of an SGM or XML evaluation set, one line each."""
    return [" ".join(html.unescape(text).split()) for text in SEGMENT.findall("\n".join(read_lines(path)))]


def read_talks(path):
    return (TITLE.sub("", line).strip() for line in read_lines(path) if not MARKUP_LINE.match(line))


def read_text(path):
    return read_segments(path) if path.endswith((".sgm", ".xml")) else read_lines(path)


def aligned(sides, what):
    """Yield pairs of lines; both sides must have the same length."""
    for pair in zip_longest(*sides):
        if None in pair:
            raise UsageError(
                f"{what} has more lines in one language than in the other: delete its archive and run again"
            )
        yield pair


def read_table(path, name, columns):
    """Yield the pairs of all tables ``name`` in an archive; lines that lack a column are skipped."""
    short = 0
    for place, stream in table_streams(path, name):
        for line in decode_lines(stream, f"{path}: {place}"):
            fields = line.split("\t")
            if len(fields) > max(columns):
                yield tuple(" ".join(fields[column].split()) for column in columns)
            else:
                short += 1
    if short:
        print(f"  skipped {short:,} lines of {path} without both columns")


def table_streams(path, name):
    if not name:
        with gzip.open(path) as stream:
            yield os.path.basename(path), stream
        return
    found = False
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isfile() and ends_with(entry.name, name):
                found = True
                member = archive.extractfile(entry)
                yield entry.name, gzip.open(member) if entry.name.endswith(".gz") else member
    if not found:
        raise UsageError(f"{path} lacks {name}: delete it and run the same command again")


def restored(pairs, langs):
    """Yield plain text of pairs that were tokenised and truecased with the Moses tools."""
    from sacremoses import MosesDetokenizer, MosesDetruecaser

    truecase, tools = MosesDetruecaser(), [MosesDetokenizer(lang) for lang in langs]
    for pair in pairs:
        cased = (truecase.detruecase(side, return_str=True) if side else "" for side in pair)
        yield tuple(tool.detokenize(side.split()) for tool, side in zip(tools, cased))


def read_part(part, archives):
    """Yield the pairs of one part of a set."""
    langs = archives.langs
    if "sacrebleu" in part:
        path, names = archives.of_sacrebleu(part["sacrebleu"])
        paths = archives.members([path], [[name] for name in names], part["sacrebleu"])
        pairs = aligned(map(read_text, paths), part["sacrebleu"])
    elif "columns" in part:
        columns = [part["columns"][lang] for lang in langs]
        pairs = read_table(archives.get(part["archive"]), part.get("table", ""), columns)
    else:
        names = as_list(part.get("talks") or part["text"])
        keys = [archives.get(key) for key in as_list(part["archive"])]
        paths = archives.members(keys, [[name.format(lang=lang) for name in names] for lang in langs], names[0])
        pairs = aligned(map(read_talks if "talks" in part else read_text, paths), names[0])
    return restored(pairs, langs) if part.get("restore") else pairs


def write_set(name, parts, archives, out, every=0):
    """Write a set; every ``every``-th pair is written to the validation set instead."""
    splits = (name, "valid") if every else (name,)
    paths = {split: [os.path.join(out, f"{split}.{lang}") for lang in archives.langs] for split in splits}
    with pair_writers(paths) as writers:
        for count, pair in enumerate((pair for part in parts for pair in read_part(part, archives)), 1):
            writers["valid" if every and count % every == 0 else name].add(pair)


def write_sample(name, count, langs, out):
    """Write *count* training pairs at equal distances as the set *name*; they remain in the training set."""
    with open(os.path.join(out, f"train.{langs[0]}"), encoding="utf-8") as stream:
        step = max(1, sum(1 for _ in stream) // count)
    sides = [islice(read_lines(os.path.join(out, f"train.{lang}")), 0, step * count, step) for lang in langs]
    with PairWriter(os.path.join(out, f"{name}.{lang}") for lang in langs) as writer:
        writer.add_all(zip(*sides))


def build(description, archives, out):
    valid = description["valid"]
    every = valid["every"] if isinstance(valid, dict) else 0
    write_set("train", description["train"], archives, out, every)
    for name in filter(SETS.fullmatch, description):
        parts = description[name]
        if isinstance(parts, list) and name != "train":
            write_set(name, parts, archives, out)
        elif "sample" in parts:
            write_sample(name, parts["sample"], archives.langs, out)


def fetch_all(description, archives):
    """Download all archives before any is unpacked, to detect missing archives early."""
    for key in description["archives"]:
        archives.get(key)
    parts = (part for name, parts in description.items() if SETS.fullmatch(name) for part in parts)
    for name in dict.fromkeys(part["sacrebleu"] for part in parts if "sacrebleu" in part):
        archives.of_sacrebleu(name)


def rebuild(plan, out):
    """Download the archives of the plan's description, and write {train,valid,test,test1 ...}.LANG to *out*."""
    options, langs, description = plan.options, plan.langs, read_description(plan.description)
    if sorted(langs) != sorted(description["languages"]):
        known = "-".join(description["languages"])
        raise UsageError(f"this corpus is {known}, not {langs[0]}-{langs[1]}: give your own text with --data")
    known = options.checksums or ("none" if options.data_url else KNOWN)
    sums = None if options.checksums == "none" else read_checksums(known)
    archives = Archives(description["archives"], langs, plan.path("download"), options.data_url, sums)
    fetch_all(description, archives)
    print("  unpacking", flush=True)
    with replaced_folder(out) as folder, tempfile.TemporaryDirectory(dir=folder) as archives.work:
        build(description, archives, folder)
