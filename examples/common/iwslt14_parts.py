"""Rebuild the IWSLT14 German-English data as it is commonly used.

Training: the TED talks without their mark-up; every 23rd pair becomes validation data.  Test: dev2010, dev2012 and
tst2010 to tst2012 together, 6750 sentences.
"""

import argparse
import os
import re
import tempfile

from corpus import die, read_lines, replaced_folder, run
from fetch import extract, fetch, read_checksums

ARCHIVE = "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
MARKUP_LINE = re.compile(r"<(url|talkid|keywords|speaker|reviewer|translator)\b")
TITLE = re.compile(r"</?(title|description)>")
SEGMENT = re.compile(r"<seg id=\"[^\"]*\">\s*(.*?)\s*</seg>")
VALID_EVERY = 23


def talk_lines(path):
    return [TITLE.sub("", line).strip() for line in read_lines(path) if not MARKUP_LINE.match(line)]


def segments(path):
    return [match.group(1) for match in map(SEGMENT.search, read_lines(path)) if match]


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in lines)


def unpack(archive, langs, work):
    """Extract the files that are needed; return the paths of talks and of test sets, per language."""
    talks = {lang: f"train.tags.de-en.{lang}" for lang in langs}
    tests = {lang: [f"IWSLT14.{name}.de-en.{lang}.xml" for name in TEST_SETS] for lang in langs}
    wanted = [*talks.values(), *(name for names in tests.values() for name in names)]
    missing = extract(archive, {name: name for name in wanted}, work)
    if missing:
        die(f"{archive} lacks {', '.join(missing)}: delete it and run the same command again")
    return talks, tests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--archives", required=True, help="folder to keep the archive in")
    parser.add_argument("--out", required=True, help="folder to write {train,valid,test}.{de,en} to")
    parser.add_argument("--url", default="", help="folder that holds the archive, instead of its home")
    parser.add_argument("--checksums", default="", help="file of sha256 sums")
    args = parser.parse_args()
    langs = (args.source_lang, args.target_lang)
    if sorted(langs) != ["de", "en"]:
        die(f"this archive is German-English, not {langs[0]}-{langs[1]}: give your own text with --data")
    url = f"{args.url.rstrip('/')}/de-en.tgz" if args.url else ARCHIVE
    archive = fetch(url, args.archives, read_checksums(args.checksums))
    with replaced_folder(args.out) as out, tempfile.TemporaryDirectory(dir=out) as work:
        talks, tests = unpack(archive, langs, work)
        for lang in langs:
            lines = talk_lines(os.path.join(work, talks[lang]))
            write_lines(os.path.join(out, f"valid.{lang}"), lines[VALID_EVERY - 1 :: VALID_EVERY])
            write_lines(os.path.join(out, f"train.{lang}"), (x for n, x in enumerate(lines, 1) if n % VALID_EVERY))
            test = (line for name in tests[lang] for line in segments(os.path.join(work, name)))
            write_lines(os.path.join(out, f"test.{lang}"), test)


if __name__ == "__main__":
    run(main)
