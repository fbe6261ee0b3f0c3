"""Rebuild the WMT16 English-German training data from its public parts.

Training: Europarl v7, Common Crawl and News Commentary v11, in this order.  Validation: newstest2013.  Test:
newstest2014, all 3003 sentences; its SGM files are those of the German-English direction, which hold the same
sentences.
"""

import argparse
import html
import os
import re
import shutil
import tempfile

from corpus import die, replaced_folder, run
from fetch import extract, fetch, read_checksums

ARCHIVES = {
    "europarl": "http://www.statmt.org/europarl/v7/de-en.tgz",
    "commoncrawl": "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "news": "http://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
    "dev": "http://data.statmt.org/wmt16/translation-task/dev.tgz",
    "test": "http://data.statmt.org/wmt16/translation-task/test.tgz",
}
TRAIN = {"europarl": "europarl-v7.de-en", "commoncrawl": "commoncrawl.de-en", "news": "news-commentary-v11.de-en"}
VALID, TEST = "newstest2013", "newstest2014"
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


def read_sgm(path):
    """Return the segments of an SGM file, one line each."""
    with open(path, encoding="utf-8") as stream:
        return [" ".join(html.unescape(text).split()) for text in SEGMENT.findall(stream.read())]


def fetch_all(base, folder, checksums):
    urls = {key: f"{base.rstrip('/')}/{url.rsplit('/', 1)[-1]}" if base else url for key, url in ARCHIVES.items()}
    return {key: fetch(url, folder, checksums) for key, url in urls.items()}


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
        candidates = [f"{name}.{lang}"]
        for pair in ("ende", "deen"):
            candidates += [f"{name}-{pair}-{role}.{lang}.sgm" for role in ("src", "ref")]
        candidates += [f"{name}-{role}.{lang}.sgm" for role in ("src", "ref")]
        found = None
        for archive in (archives["dev"], archives["test"]):
            missing = extract(archive, {member: member for member in candidates}, work)
            found = found or next((member for member in candidates if member not in missing), None)
        if not found:
            die(f"neither {archives['dev']} nor {archives['test']} holds {name} in '{lang}'")
        path = os.path.join(work, found)
        if found.endswith(".sgm"):
            with open(os.path.join(out, f"{split}.{lang}"), "w", encoding="utf-8") as target:
                target.writelines(line + "\n" for line in read_sgm(path))
        else:
            shutil.copyfile(path, os.path.join(out, f"{split}.{lang}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--archives", required=True, help="folder to keep the archives in")
    parser.add_argument("--out", required=True, help="folder to write {train,valid,test}.{en,de} to")
    parser.add_argument("--url", default="", help="folder that holds all archives, instead of their homes")
    parser.add_argument("--checksums", default="", help="file of sha256 sums")
    args = parser.parse_args()
    langs = (args.source_lang, args.target_lang)
    if sorted(langs) != ["de", "en"]:
        die(f"WMT16 is English-German, not {langs[0]}-{langs[1]}: give your own text with --data")
    archives = fetch_all(args.url, args.archives, read_checksums(args.checksums))
    print("  unpacking", flush=True)
    with replaced_folder(args.out) as out, tempfile.TemporaryDirectory(dir=out) as work:
        build_train(archives, langs, work, out)
        build_set("valid", VALID, archives, langs, work, out)
        build_set("test", TEST, archives, langs, work, out)


if __name__ == "__main__":
    run(main)
