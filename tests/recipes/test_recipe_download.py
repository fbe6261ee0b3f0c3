"""Fetching and rebuilding corpora, from small archives that look like the real ones."""

import hashlib
import http.server
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fairseq_deep.recipes.text import rebuild
from tests.helpers.paths import ROOT
from tests.helpers.recipes import LANGS, assert_refused, lines, pack, program, sgm


@pytest.fixture
def home(tmp_path):
    """The five archives of WMT16 in small."""
    folder = tmp_path / "home"
    folder.mkdir()
    parts = {
        "de-en.tgz": "europarl-v7.de-en",
        "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
        "training-parallel-nc-v11.tgz": "training-parallel-nc-v11/news-commentary-v11.de-en",
    }
    for name, prefix in parts.items():
        text = prefix.split("/")[-1].split(".")[0]
        pack(folder / name, {f"{prefix}.{lang}": f"{text} {lang} 1\n{text} {lang} 2\n" for lang in LANGS})
    dev = {f"dev/newstest2013.{lang}": f"valid {lang}\n" for lang in LANGS}
    dev["dev/newstest2014-deen-src.de.sgm"] = sgm("A &amp; B", "zwei")
    dev["dev/newstest2014-deen-ref.en.sgm"] = sgm("A &amp; B", "two")
    pack(folder / "dev.tgz", dev)
    pack(folder / "test.tgz", {"test/newstest2016-ende-src.en.sgm": sgm("other")})
    return folder


def fetch(home_url, tmp_path, *words, task="wmt16_ende", **how):
    places = ["--url", home_url, "--archives", tmp_path / "archives", "--out", tmp_path / "corpus"]
    return program("rebuild", "--corpus", ROOT / "examples" / task / "corpus.json", *places, *words, **how)


def test_wmt16_is_rebuilt_from_its_parts(home, tmp_path):
    done = fetch(home.as_uri(), tmp_path)
    assert done.returncode == 0, done.stderr
    corpus = tmp_path / "corpus"
    expected = [f"{part} de {n}" for part in ("europarl-v7", "commoncrawl", "news-commentary-v11") for n in (1, 2)]
    assert lines(corpus / "train.de") == expected
    assert lines(corpus / "valid.en") == ["valid en"]
    assert lines(corpus / "test.en") == ["A & B", "two"] and lines(corpus / "test.de") == ["A & B", "zwei"]
    assert {path.name for path in corpus.iterdir()} == {f"{s}.{x}" for s in ("train", "valid", "test") for x in LANGS}


def test_archives_are_fetched_once(home, tmp_path):
    assert "fetching" in fetch(home.as_uri(), tmp_path).stdout
    assert "fetching" not in fetch(home.as_uri(), tmp_path).stdout


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "last byte"])
def test_a_corrupt_archive_leaves_nothing_and_can_be_fetched_again(home, tmp_path, damage):
    archive = home / "training-parallel-commoncrawl.tgz"
    whole = archive.read_bytes()
    bad = {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"<html>quota</html>", "last byte": whole[:-1]}
    archive.write_bytes(bad[damage])
    assert_refused(fetch(home.as_uri(), tmp_path), archive.name, "again")
    assert not (tmp_path / "corpus").exists()
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ["de-en.tgz"]
    archive.write_bytes(whole)
    assert fetch(home.as_uri(), tmp_path).returncode == 0


def test_a_wrong_checksum_is_refused(home, tmp_path):
    sums = tmp_path / "SHA256SUMS"
    right = hashlib.sha256((home / "de-en.tgz").read_bytes()).hexdigest()
    sums.write_text(f"{right}  de-en.tgz\n{'0' * 64}  dev.tgz\n")
    assert_refused(fetch(home.as_uri(), tmp_path, "--checksums", sums), "dev.tgz", "sha256", "0" * 64)
    assert (tmp_path / "archives/de-en.tgz").exists() and not (tmp_path / "archives/dev.tgz").exists()


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_right_checksum_of_either_kind_is_taken(home, tmp_path, kind):
    sums = tmp_path / "sums"
    archives = sorted(home.glob("*.tgz"))
    text = "".join(f"{hashlib.new(kind, path.read_bytes()).hexdigest()}  {path.name}\n" for path in archives)
    sums.write_text(f"# of {kind}\n\n{text}")
    done = fetch(home.as_uri(), tmp_path, "--checksums", sums)
    assert done.returncode == 0 and "not verified" not in done.stdout, done.stderr


def test_archives_from_their_home_must_be_the_known_ones(home, tmp_path):
    """With other addresses: these archives are not those."""
    own = tmp_path / "corpus.json"
    text = (ROOT / "examples/wmt16_ende/corpus.json").read_text()
    own.write_text(re.sub(r"https://[^\"]*/", home.as_uri() + "/", text))
    command = ["rebuild", "--corpus", own, "--archives", tmp_path / "archives", "--out", tmp_path / "out"]
    done = program(*command)
    assert_refused(done, "commoncrawl", "not c7a74e2ea01a", "or skip the check with --checksums none")
    assert "(not verified, no known checksum)" in done.stdout and not (tmp_path / "out").exists()
    done = program(*command, "--checksums", "none")
    assert done.returncode == 0 and (tmp_path / "out/train.en").exists(), done.stderr


def test_a_missing_archive_is_named(home, tmp_path):
    (home / "test.tgz").unlink()
    assert_refused(fetch(home.as_uri(), tmp_path), "cannot download", "test.tgz", "--data")


class BrokenHome(http.server.SimpleHTTPRequestHandler):
    """Serves ranges, and breaks off the first answer half-way."""

    asked = []

    def do_GET(self):
        data = Path(self.translate_path(self.path)).read_bytes()
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        begin = int(wanted.split("=")[1].rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        self.wfile.write(data[begin : len(data) // 2 if len(self.asked) == 1 else None])

    def log_message(self, *_):
        pass


def test_a_broken_connection_is_taken_up_where_it_ended(home, tmp_path):
    size = (home / "de-en.tgz").stat().st_size
    handler = type("Handler", (BrokenHome,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: handler(*a, directory=str(home)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = fetch(f"http://127.0.0.1:{server.server_port}", tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert handler.asked[:2] == [None, f"bytes={size // 2}-"]
    assert (tmp_path / "archives/de-en.tgz").read_bytes() == (home / "de-en.tgz").read_bytes()


def google_tar(path, **changed):
    names = {"train": "train.tok.clean", "valid": "newstest2013.tok", "test": "newstest2014.tok"}
    sizes = {"train": (4, 4), "valid": (3, 3), "test": (2, 2), **changed}
    files = {
        f"{names[s]}.bpe.32000.{x}": "ein@@ s\n" * n
        for s, counts in sizes.items()
        if counts
        for x, n in zip(LANGS, counts)
    }
    pack(path, {**files, "newstest2014.de": "eins\neins\n"})
    return path


def unpack(tar, tmp_path, *words):
    return program("wmt16_tar", "--tar", tar, "--out", tmp_path / "text", *words)


def test_the_preprocessed_archive_is_unpacked(tmp_path):
    tar = google_tar(tmp_path / "wmt.tar.gz")
    digest = hashlib.sha256(tar.read_bytes()).hexdigest()
    done = unpack(tar, tmp_path, "--sha256", digest, "--lines", "train=3-5,valid=3,test=2")
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "text/bpe/train.de") == ["ein@@ s"] * 4
    assert lines(tmp_path / "text/raw/test.de") == ["eins", "eins"]


@pytest.mark.parametrize(
    "changed, words, parts",
    [
        ({"test": None}, [], ["newstest2014.tok.bpe.32000.de", "newstest2014.tok.bpe.32000.en"]),
        ({"valid": (3, 4)}, [], ["has 3 lines", "has 4"]),
        ({}, ["--lines", "train=5-9"], ["has 4 lines, not 5 to 9"]),
        ({}, ["--sha256", "ab" * 32], ["sha256", "ab" * 32]),
        ({}, ["--lines", "train=x"], ["train=x"]),
    ],
)
def test_another_preprocessed_archive_is_refused(tmp_path, changed, words, parts):
    assert_refused(unpack(google_tar(tmp_path / "wmt.tar.gz", **changed), tmp_path, *words), *parts)
    assert not (tmp_path / "text/bpe").exists()


def test_training_pairs_as_a_test_set(tmp_path):
    """At equal distances, and they remain training pairs."""
    pack(tmp_path / "a.tgz", {f"train.{lang}": "\n".join(f"{n} {lang}" for n in range(7)) for lang in ("de", "en")})
    archives = rebuild.Archives({"a": (tmp_path / "a.tgz").as_uri()}, ["de", "en"], str(tmp_path), "", None)
    archives.work, train = str(tmp_path), [{"archive": "a", "text": "train.{lang}"}]
    rebuild.build({"test1": {"sample": 3}, "train": train, "valid": {"every": 100}}, archives, str(tmp_path))
    assert lines(tmp_path / "test1.de") == ["0 de", "2 de", "4 de"]
    assert lines(tmp_path / "test1.en") == ["0 en", "2 en", "4 en"] and len(lines(tmp_path / "train.en")) == 7


def test_iwslt14_is_rebuilt_from_the_talks(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    files = {}
    for lang in LANGS:
        talks = [f"<title> T {lang} </title>", "<url>http://x</url>", "<keywords>k</keywords>"]
        talks += [f"{n} {lang}" for n in range(1, 24)]
        files[f"de-en/train.tags.de-en.{lang}"] = "\n".join(talks) + "\n"
        for name in ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"):
            files[f"de-en/IWSLT14.{name}.de-en.{lang}.xml"] = sgm(f" {name} {lang} ")
    pack(home / "de-en.tgz", files)
    done = fetch(home.as_uri(), tmp_path, task="iwslt14_deen", langs=("de", "en"))
    assert done.returncode == 0, done.stderr
    corpus = tmp_path / "corpus"
    assert lines(corpus / "train.de") == ["T de", *(f"{n} de" for n in range(1, 22)), "23 de"]
    assert lines(corpus / "valid.en") == ["22 en"]
    tests = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    assert lines(corpus / "test.en") == [f"{name} en" for name in tests]


@pytest.fixture
def data_stages(tmp_path):
    """Run stages 1 and 2 of the recipe, which need nothing but this Python."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (("python", "exit 0"), ("python3", f'exec {sys.executable} "$@"')):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(stat.S_IRWXU)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FAIRSEQ_DEEP_ENV": "current", "CUDA_VISIBLE_DEVICES": ""}

    def run(*words):
        command = [
            ROOT / "run_wmt16_ende.sh",
            "--exp",
            tmp_path / "exp",
            "--disk-gb",
            "0",
            "--stage",
            "1",
            "--stop-stage",
            "2",
        ]
        command += ["--workers", "1", "--bpe-merges", "10", *words]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)

    return run


def test_the_recipe_fetches_cleans_and_cuts(home, tmp_path, data_stages):
    bad = (home / "test.tgz").read_bytes()
    (home / "test.tgz").write_bytes(bad[:-20])
    broken = data_stages("--data-url", home.as_uri())
    assert broken.returncode == 2 and broken.stderr.count("\n") == 1 and "test.tgz" in broken.stderr
    assert not (tmp_path / "exp/text").exists()
    (home / "test.tgz").write_bytes(bad)
    done = data_stages("--data-url", home.as_uri())
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "exp/text/bpe/train.de")) == 6
    assert (tmp_path / "exp/text/bpe/code").stat().st_size > 0


def test_the_recipe_takes_the_preprocessed_archive(tmp_path, data_stages):
    done = data_stages("--data-tar", google_tar(tmp_path / "wmt.tar.gz"), "--data-lines", "train=4")
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "exp/text/bpe/test.en") == ["ein@@ s"] * 2
