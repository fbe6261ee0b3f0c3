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

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import decode_lines

from .corpus import Row, aligned, in_folder, read_lines, read_rows, replaced_folder, write_rows
from .fetch import Downloads, ends_with, extract, members

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
MARKUP_LINE = re.compile(r"<(url|talkid|keywords|speaker|reviewer|translator)\b")
TITLE = re.compile(r"</?(title|description)>")
SETS = re.compile(r"train|valid|test\d*")
AGAIN = "delete it and run the same command again"
Part = dict[str, Any]


def read_description(path: str) -> dict[str, Any]:
    """Return the description in the file *path*."""
    with open(path, encoding="utf-8") as stream:
        found = json.load(stream)
    if "like" in found:
        found = {**read_description(os.path.join(os.path.dirname(path), found["like"])), **found}
    return found


def as_list(value: Any) -> list[Any]:
    """Return a list: *value*, or one with this value."""
    return value if isinstance(value, list) else [value]


def of_sacrebleu(name: str, langs: Sequence[str]) -> tuple[tuple[str, str, str], dict[str, str]]:
    """Return the arguments of `Downloads.get` for a test set, and the names of its members by language."""
    from sacrebleu.dataset import DATASETS

    found, pair = DATASETS[name], "-".join(langs)
    if pair not in found.langpairs:
        raise UsageError(f"sacreBLEU's {name} has no {pair}: give your own text with --data")
    address = found.data[0]
    # sacreBLEU's archives have the same name in different years
    own = f"{name.replace('/', '-')}-{address.rsplit('/', 1)[-1]}"
    return (address, own, found.md5[0] if found.md5 else ""), dict(zip(langs, found.langpairs[pair]))


class Corpus:
    """The sets of a description.

    Args:
        langs: source and target language
        work: directory for extracted files

    Attributes:
        archives: arguments of `Downloads.get` by key
    """

    def __init__(self, description: dict[str, Any], langs: Sequence[str], downloads: Downloads, work: str = ""):
        self.langs, self.downloads, self.work = langs, downloads, work
        self.archives = {key: (address,) for key, address in description["archives"].items()}
        self.sets = {name: parts for name, parts in description.items() if SETS.fullmatch(name)}
        for part in [part for parts in self.sets.values() for part in as_list(parts) if "sacrebleu" in part]:
            part["archive"] = part["sacrebleu"]
            self.archives[part["archive"]], part["text"] = of_sacrebleu(part["sacrebleu"], langs)

    def fetch_all(self) -> None:
        """Download all archives before any is unpacked, to detect missing archives early."""
        for archive in self.archives.values():
            self.downloads.get(*archive)

    def build(self, out: str) -> None:
        """Write all sets to *out*; the training set is first, since a sample needs it."""
        for name in sorted(self.sets, key=lambda name: name != "train"):
            write_rows(in_folder(out, name, self.langs), self._rows_of(name, out))

    def _rows_of(self, name: str, out: str) -> Iterator[Row]:
        """Yield the rows of a set; *out* has the training set."""
        parts, every = self.sets[name], as_list(self.sets["valid"])[0].get("every")
        if "every" in parts:
            return islice(self._read(self.sets["train"]), every - 1, None, every)
        if "sample" in parts:
            paths, count = in_folder(out, "train", self.langs), parts["sample"]
            step = max(1, sum(1 for _ in read_lines(paths[0])) // count)
            return islice(read_rows(paths), 0, step * count, step)
        rows = self._read(parts)
        return (row for n, row in enumerate(rows, 1) if n % every) if every and name == "train" else rows

    def _read(self, parts: list[Part]) -> Iterator[Row]:
        """Yield the pairs of several parts."""
        return chain.from_iterable(map(self._read_part, parts))

    def _read_part(self, part: Part) -> Iterator[Row]:
        """Return the pairs of one part of a set."""
        archives = [self.downloads.get(*self.archives[key]) for key in as_list(part["archive"])]
        if "columns" in part:
            pairs = read_table(archives[0], part.get("table", ""), [part["columns"][lang] for lang in self.langs])
        else:
            names, read = (part["talks"], read_talks) if "talks" in part else (part["text"], read_text)
            paths = [self._member(archives, names, lang) for lang in self.langs]
            places = [f"{archives[0]} in '{lang}'" for lang in self.langs]
            pairs = aligned(map(read, paths), places, AGAIN)
        return restored(pairs, self.langs) if part.get("restore") else pairs

    def _member(self, archives: list[str], names: Any, lang: str) -> str:
        """Extract the first existing member of the possible *names*, and return its path."""
        names = [names[lang]] if isinstance(names, dict) else [name.format(lang=lang) for name in as_list(names)]
        ways = {f"{number}.{lang}{os.path.splitext(name)[1]}": name for number, name in enumerate(names)}
        for archive in archives:
            missing = extract(archive, ways, self.work)
            for way in ways:
                if way not in missing:
                    return os.path.join(self.work, way)
        raise UsageError(f"{' and '.join(archives)} lack {names[0]}: {AGAIN}")


def read_text(path: str) -> Iterable[str]:
    """Return the lines of a text, or the segments of an SGM or XML evaluation set."""
    if not path.endswith((".sgm", ".xml")):
        return read_lines(path)
    return [" ".join(html.unescape(text).split()) for text in SEGMENT.findall("\n".join(read_lines(path)))]


def read_talks(path: str) -> Iterator[str]:
    """Return the lines of TED talks without their mark-up."""
    return (TITLE.sub("", line).strip() for line in read_lines(path) if not MARKUP_LINE.match(line))


def read_table(path: str, name: str, columns: list[int]) -> Iterator[Row]:
    """Yield the pairs of all tables *name* in an archive; lines that lack a column are skipped."""
    short = 0
    for place, stream in _tables(path, name):
        for line in decode_lines(stream, f"{path}: {place}"):
            fields = line.split("\t")
            if len(fields) > max(columns):
                yield tuple(" ".join(fields[column].split()) for column in columns)
            else:
                short += 1
    if short:
        print(f"  skipped {short:,} lines of {path} without both columns")


def _tables(path: str, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the names and contents of the tables; without a *name*, of the archive itself."""
    if not name:
        with open(path, "rb") as stream:
            yield os.path.basename(path), stream
        return
    found = False
    for member, content in members(path):
        if ends_with(member, name):
            found = True
            yield member, content
    if not found:
        raise UsageError(f"{path} lacks {name}: {AGAIN}")


def restored(pairs: Iterator[Row], langs: Sequence[str]) -> Iterator[Row]:
    """Yield plain text of pairs that were tokenised and truecased with the Moses tools."""
    from sacremoses import MosesDetokenizer, MosesDetruecaser

    truecase, tools = MosesDetruecaser(), [MosesDetokenizer(lang) for lang in langs]
    for pair in pairs:
        cased = (truecase.detruecase(side, return_str=True) if side else "" for side in pair)
        yield tuple(tool.detokenize(side.split()) for tool, side in zip(tools, cased))


def rebuild(plan: Plan, out: str) -> None:
    """Download the archives of the plan's description, and write {train,valid,test,test1 ...}.LANG to *out*."""
    langs, description = plan.langs, read_description(plan.description)
    if sorted(langs) != sorted(description["languages"]):
        known = "-".join(description["languages"])
        raise UsageError(f"this corpus is {known}, not {langs[0]}-{langs[1]}: give your own text with --data")
    corpus = Corpus(description, langs, Downloads(plan))
    corpus.fetch_all()
    print("  unpacking", flush=True)
    with replaced_folder(out) as folder, tempfile.TemporaryDirectory(dir=folder) as corpus.work:
        corpus.build(folder)
