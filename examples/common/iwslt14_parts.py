"""Rebuild the IWSLT14 German-English data as it is commonly used.

Training: the TED talks without their mark-up; every 23rd pair becomes validation data.  Test: dev2010, dev2012 and
tst2010 to tst2012 together, 6750 sentences.
"""

import os
import re

from corpus import die, read_lines, run
from fetch import extract, read_segments, rebuild, write_lines

ARCHIVES = {"talks": "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"}
TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
MARKUP_LINE = re.compile(r"<(url|talkid|keywords|speaker|reviewer|translator)\b")
TITLE = re.compile(r"</?(title|description)>")
VALID_EVERY = 23


def talk_lines(path):
    return [TITLE.sub("", line).strip() for line in read_lines(path) if not MARKUP_LINE.match(line)]


def unpack(archive, langs, work):
    """Extract the files that are needed; return the paths of talks and of test sets, per language."""
    talks = {lang: f"train.tags.de-en.{lang}" for lang in langs}
    tests = {lang: [f"IWSLT14.{name}.de-en.{lang}.xml" for name in TEST_SETS] for lang in langs}
    wanted = [*talks.values(), *(name for names in tests.values() for name in names)]
    missing = extract(archive, {name: name for name in wanted}, work)
    if missing:
        die(f"{archive} lacks {', '.join(missing)}: delete it and run the same command again")
    return talks, tests


def build(archives, langs, work, out):
    talks, tests = unpack(archives["talks"], langs, work)
    for lang in langs:
        lines = talk_lines(os.path.join(work, talks[lang]))
        write_lines(os.path.join(out, f"valid.{lang}"), lines[VALID_EVERY - 1 :: VALID_EVERY])
        write_lines(os.path.join(out, f"train.{lang}"), (x for n, x in enumerate(lines, 1) if n % VALID_EVERY))
        test = (line for name in tests[lang] for line in read_segments(os.path.join(work, name)))
        write_lines(os.path.join(out, f"test.{lang}"), test)


if __name__ == "__main__":
    run(lambda: rebuild(__doc__, ARCHIVES, build))
