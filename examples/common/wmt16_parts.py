"""Rebuild the WMT16 English-German training data from its public parts.

Training: Europarl v7, Common Crawl and News Commentary v11, in this order.  Validation: newstest2013.  Test:
newstest2014, all 3003 sentences; its SGM files are those of the German-English direction, which hold the same
sentences.
"""

import os
import shutil

from corpus import die, run
from fetch import extract, read_segments, rebuild, write_lines

ARCHIVES = {
    "europarl": "https://www.statmt.org/europarl/v7/de-en.tgz",
    "commoncrawl": "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "news": "https://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
    "dev": "https://data.statmt.org/wmt16/translation-task/dev.tgz",
    "test": "https://data.statmt.org/wmt16/translation-task/test.tgz",
}
TRAIN = {"europarl": "europarl-v7.de-en", "commoncrawl": "commoncrawl.de-en", "news": "news-commentary-v11.de-en"}
VALID, TEST = "newstest2013", "newstest2014"


def build_train(archives, langs, work, out):
    for lang in langs:
        with open(os.path.join(out, f"train.{lang}"), "wb") as target:
            for part, prefix in TRAIN.items():
                name = f"{prefix}.{lang}"
                if extract(archives[part], {name: name}, work):
                    die(f"{archives[part]} holds no {name}: delete it and run the same command again")
                with open(os.path.join(work, name), "rb") as stream:
                    shutil.copyfileobj(stream, target)
                os.remove(os.path.join(work, name))


def build_set(split, name, archives, langs, work, out):
    """Write one evaluation set, from plain files where there are any, else from SGM."""
    for lang in langs:
        marked_up = (f"{name}{pair}-{role}.{lang}.sgm" for pair in ("-ende", "-deen", "") for role in ("src", "ref"))
        candidates = [f"{name}.{lang}", *marked_up]
        found = None
        for archive in (archives["dev"], archives["test"]):
            missing = extract(archive, {member: member for member in candidates}, work)
            found = found or next((member for member in candidates if member not in missing), None)
        if not found:
            die(f"neither {archives['dev']} nor {archives['test']} holds {name} in '{lang}'")
        path = os.path.join(work, found)
        if found.endswith(".sgm"):
            write_lines(os.path.join(out, f"{split}.{lang}"), read_segments(path))
        else:
            shutil.copyfile(path, os.path.join(out, f"{split}.{lang}"))


def build(archives, langs, work, out):
    build_train(archives, langs, work, out)
    build_set("valid", VALID, archives, langs, work, out)
    build_set("test", TEST, archives, langs, work, out)


if __name__ == "__main__":
    run(lambda: rebuild(__doc__, ARCHIVES, build))
