"""Fetching archives and rebuilding corpora; what goes wrong is one line, and nothing half-written is taken."""

import gzip
import hashlib
import http.client
import http.server
import json
import multiprocessing
import os
import re
import resource
import threading
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import pytest
from sacrebleu.dataset import DATASETS

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.recipe import Recipe
from fairseq_deep.recipes.text import fetch, rebuild
from tests.helpers.paths import ROOT
from tests.helpers.recipes import LANGS, lines, pack, sgm

WMT16 = ROOT / "examples/wmt16_ende/corpus.json"
DESCRIPTIONS = sorted((ROOT / "examples").glob("*/*.json"))


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


def downloads(folder):
    return fetch.Downloads(SimpleNamespace(options=Recipe(), path=lambda name: str(folder)))


def make(tmp_path, url, checksums="", description=WMT16, langs=LANGS):
    """Rebuild a corpus in ``tmp_path/corpus`` from archives at *url*."""
    options = Recipe(source_lang=langs[0], target_lang=langs[1], data_url=url, checksums=str(checksums))
    plan = SimpleNamespace(options=options, langs=langs, description=str(description),
                           path=lambda name: str(tmp_path / "archives"))  # fmt: skip
    rebuild.rebuild(plan, str(tmp_path / "corpus"))
    return tmp_path / "corpus"


def refuse(problem, *arguments, **options):
    """The corpus cannot be rebuilt, for this reason, and nothing of it is there."""
    with pytest.raises(UsageError) as error:
        make(*arguments, **options)
    assert problem in error.value.message and "\n" not in error.value.message
    assert not list(arguments[0].glob("corpus*/*")), "half a corpus"


def test_wmt16_is_rebuilt_from_archives_that_are_fetched_once(home, tmp_path, capsys):
    corpus = make(tmp_path, home.as_uri())
    expected = [f"{part} de {n}" for part in ("europarl-v7", "commoncrawl", "news-commentary-v11") for n in (1, 2)]
    assert lines(corpus / "train.de") == expected and lines(corpus / "valid.en") == ["valid en"]
    assert lines(corpus / "test.en") == ["A & B", "two"] and lines(corpus / "test.de") == ["A & B", "zwei"]
    assert {path.name for path in corpus.iterdir()} == {f"{s}.{x}" for s in ("train", "valid", "test") for x in LANGS}
    assert "fetching" in capsys.readouterr().out
    make(tmp_path, home.as_uri())
    assert "fetching" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "last byte"])
def test_a_corrupt_archive_leaves_nothing_and_can_be_fetched_again(home, tmp_path, damage):
    archive = home / "training-parallel-commoncrawl.tgz"
    whole = archive.read_bytes()
    bad = {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"<html>quota</html>", "last byte": whole[:-1]}
    archive.write_bytes(bad[damage])
    problem = "the file is empty" if damage == "empty" else "truncated or invalid tar.gz archive"
    refuse(f"{archive.name}: {problem}", tmp_path, home.as_uri())
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ["de-en.tgz"]
    archive.write_bytes(whole)
    make(tmp_path, home.as_uri())


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_checksums_of_either_kind_are_verified(home, tmp_path, kind, capsys):
    sums = tmp_path / "sums"
    found = {path.name: hashlib.new(kind, path.read_bytes()).hexdigest() for path in home.glob("*.tgz")}
    sums.write_text("# sums\n\n" + "".join(f"{digest}  {name}\n" for name, digest in found.items()))
    make(tmp_path, home.as_uri(), sums)
    assert "not verified" not in capsys.readouterr().out
    sums.write_text(f"{'0' * len(found['dev.tgz'])}  dev.tgz\n")
    (tmp_path / "archives/dev.tgz").unlink()
    (tmp_path / "corpus").rename(tmp_path / "before")
    refuse(f"{kind} is {found['dev.tgz']}, not 000", tmp_path, home.as_uri(), sums)
    assert not (tmp_path / "archives/dev.tgz").exists()


def test_archives_from_their_home_must_be_the_known_ones(home, tmp_path, capsys):
    """With other addresses: these archives are not those."""
    own = tmp_path / "own.json"
    own.write_text(re.sub(r"https://[^\"]*/", home.as_uri() + "/", WMT16.read_text()))
    refuse("or skip the check with --checksums none", tmp_path, "", description=own)
    assert "(not verified, no known checksum)" in capsys.readouterr().out
    assert (make(tmp_path, "", "none", own) / "train.en").exists()


def test_sacrebleus_own_sums_hold_where_its_own_archives_are_fetched(tmp_path, monkeypatch):
    corpus = rebuild.Corpus({"archives": {}, "test": [{"sacrebleu": "wmt18"}]}, ("en", "fi"), downloads(tmp_path))
    monkeypatch.setattr(fetch, "download", lambda url, part: Path(part).write_bytes(b"<html>"))
    with pytest.raises(UsageError, match="not f996c245ecffea23d0006fa4c34e9064"):
        corpus.fetch_all()
    assert not list(tmp_path.iterdir())


def test_an_own_copy_that_is_damaged_is_refused_and_kept(tmp_path):
    (tmp_path / "corpus.gz").write_bytes(gzip.compress(b"one two three")[:-6])
    with pytest.raises(UsageError, match=r"corpus\.gz: truncated or invalid gzip archive .*; delete it, or put"):
        downloads(tmp_path).get("https://x.invalid/corpus.gz")
    assert (tmp_path / "corpus.gz").exists()


@pytest.mark.parametrize("problem", [
    http.client.IncompleteRead(b""), http.client.InvalidURL("a blank"), ConnectionRefusedError("no"),
], ids=lambda problem: type(problem).__name__)  # fmt: skip
def test_a_failed_download_is_tried_again(problem, tmp_path, monkeypatch):
    answers, waits = [problem, problem, None], []

    def stream(url, part):
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(fetch.time, "sleep", waits.append)
    monkeypatch.setattr(fetch, "stream_to_file", stream)
    fetch.download("http://127.0.0.1:9/x", str(tmp_path / "part"))
    assert len(waits) == 2
    answers[:] = [problem] * fetch.TRIES
    with pytest.raises(UsageError, match="cannot download http://127.0.0.1:9/x: .*again.*, or use --data DIR"):
        fetch.download("http://127.0.0.1:9/x", str(tmp_path / "part"))


class BrokenHome(http.server.SimpleHTTPRequestHandler):
    """Serves ranges, and breaks off the first answer half-way."""

    def do_GET(self):
        data = Path(self.translate_path(self.path)).read_bytes()
        wanted, asked = self.headers.get("Range"), self.server.asked
        asked.append(wanted)
        begin = int(wanted.split("=")[1].rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        self.wfile.write(data[begin : len(data) // 2 if len(asked) == 1 else None])

    def log_message(self, *_):
        pass


def test_a_broken_connection_is_taken_up_where_it_ended(home, tmp_path, monkeypatch):
    whole = (home / "de-en.tgz").read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: BrokenHome(*a, directory=str(home)))
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    try:
        make(tmp_path, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert server.asked[:2] == [None, f"bytes={len(whole) // 2}-"]
    assert (tmp_path / "archives/de-en.tgz").read_bytes() == whole


TABLE = {"languages": ["fi", "en"], "archives": {"table": "https://x.invalid/corpus.gz"},
         "train": [{"archive": "table", "columns": {"fi": 0, "en": 1}}],
         "valid": [{"sacrebleu": "wmt17"}], "test": [{"sacrebleu": "wmt18"}]}  # fmt: skip


@pytest.fixture
def table(tmp_path):
    """The arguments of `make` for a table, and test sets beside it."""
    folder, description = tmp_path / "table", tmp_path / "table.json"
    folder.mkdir()
    description.write_text(json.dumps(TABLE))
    (folder / "corpus.gz").write_bytes(gzip.compress(b"yksi\tone\nkolme\nkaksi\ttwo\n"))
    for year in (17, 18):
        names = [f"test/newstest20{year}-enfi-{kind}.sgm" for kind in ("src.en", "ref.fi")]
        pack(folder / f"wmt{year}-test.tgz", {name: sgm("a", "b") for name in names})
    return {"url": folder.as_uri(), "description": description, "langs": ("en", "fi")}, folder


def test_a_table_is_taken_apart(table, tmp_path, capsys):
    corpus = make(tmp_path, **table[0])
    assert "skipped 1 lines of " in capsys.readouterr().out
    assert (lines(corpus / "train.fi"), lines(corpus / "test.en")) == (["yksi", "kaksi"], ["a", "b"])


def sets(year, **files):
    return {f"test/newstest20{year}-enfi-{kind}.sgm": sgm(*text) for kind, text in files.items()}


@pytest.mark.parametrize("name, content, problem", [
    ("corpus.gz", gzip.compress(b"yksi\tone\n" + "pää\thead\n".encode("latin-1")), "corpus.gz, line 2: not UTF-8"),
    ("corpus.gz", gzip.compress(b"yksi\tone\n")[:-6], "corpus.gz: truncated or invalid gzip archive"),
    ("corpus.gz", None, "cannot download"),
    ("wmt17-test.tgz", sets(17, **{"src.en": "ab", "ref.fi": "a"}), "wmt17-test.tgz in 'fi' has 1: delete it"),
    ("wmt18-test.tgz", sets(18, **{"src.en": "ab"}), "wmt18-test.tgz lack test/newstest2018-enfi-ref.fi.sgm: delete"),
], ids=["latin-1", "truncated", "missing", "uneven", "one side"])  # fmt: skip
def test_a_bad_archive_is_refused_in_one_line(table, name, content, problem, tmp_path):
    (table[1] / name).unlink()
    if isinstance(content, dict):
        pack(table[1] / name, content)
    elif content:
        (table[1] / name).write_bytes(content)
    refuse(problem, tmp_path, **table[0])


def problem_below(most, tmp_path, given):
    """Why a corpus cannot be rebuilt in a process whose files have at most so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        make(tmp_path, **given)
    except (UsageError, OSError) as error:
        return str(error)


def test_a_full_disk_leaves_nothing_that_looks_whole(table, tmp_path):
    """A limit on the size of files stands for it: first an archive, then the text does not fit."""
    given, folder = table
    text = "".join(f"{n * 7919 % 10007} sana\t{n}\n" for n in range(20000))
    (folder / "corpus.gz").write_bytes(gzip.compress(text.encode()))
    size = (folder / "corpus.gz").stat().st_size
    for most, whole, problem in ((size // 2, False, "free disk space and run the same command again"),
                                 (size + 100, True, "File too large")):  # fmt: skip
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert problem in pool.apply(problem_below, (most, tmp_path, given))
        assert (tmp_path / "archives/corpus.gz").exists() == whole and not list(tmp_path.glob("corpus*"))
    make(tmp_path, **given)


def test_training_pairs_as_a_test_set(tmp_path):
    """At equal distances, and they remain training pairs."""
    pack(tmp_path / "a.tgz", {f"train.{lang}": "\n".join(f"{n} {lang}" for n in range(7)) for lang in ("de", "en")})
    description = {"test1": {"sample": 3}, "train": [{"archive": "a", "text": "train.{lang}"}],
                   "valid": {"every": 100}, "archives": {"a": (tmp_path / "a.tgz").as_uri()}}  # fmt: skip
    rebuild.Corpus(description, ["de", "en"], downloads(tmp_path), str(tmp_path)).build(str(tmp_path))
    assert lines(tmp_path / "test1.de") == ["0 de", "2 de", "4 de"]
    assert lines(tmp_path / "test1.en") == ["0 en", "2 en", "4 en"] and len(lines(tmp_path / "train.en")) == 7


def test_iwslt14_is_rebuilt_from_the_talks(tmp_path):
    files, home = {}, tmp_path / "home"
    home.mkdir()
    tests = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    for lang in LANGS:
        talks = [f"<title> T {lang} </title>", "<url>http://x</url>", "<keywords>k</keywords>"]
        files[f"de-en/train.tags.de-en.{lang}"] = "\n".join([*talks, *(f"{n} {lang}" for n in range(1, 24))]) + "\n"
        files.update({f"de-en/IWSLT14.{name}.de-en.{lang}.xml": sgm(f" {name} {lang} ") for name in tests})
    pack(home / "de-en.tgz", files)
    corpus = make(tmp_path, home.as_uri(), "", ROOT / "examples/iwslt14_deen/corpus.json", ("de", "en"))
    assert lines(corpus / "train.de") == ["T de", *(f"{n} de" for n in range(1, 22)), "23 de"]
    assert lines(corpus / "valid.en") == ["22 en"] and lines(corpus / "test.en") == [f"{name} en" for name in tests]


@pytest.mark.parametrize("path", DESCRIPTIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_description_is_whole(path):
    """Its archives are used, come over https under names of their own, and sacreBLEU knows its test sets."""
    found = rebuild.read_description(str(path))
    own = {name: parts for name, parts in found.items() if rebuild.SETS.fullmatch(name)}
    parts = [part for some in own.values() if isinstance(some, list) for part in some]
    used = {key for part in parts for key in rebuild.as_list(part.get("archive", []))}
    assert {"train", "valid", "test"} <= set(own) and used == set(found["archives"])
    addresses = [urllib.parse.urlsplit(address) for address in found["archives"].values()]
    assert all(address.scheme == "https" for address in addresses)
    assert len({os.path.basename(address.path) for address in addresses}) == len(addresses)
    one, two = found["languages"]
    for name in (part["sacrebleu"] for part in parts if "sacrebleu" in part):
        assert {f"{one}-{two}", f"{two}-{one}"} & set(DATASETS[name].langpairs) and DATASETS[name].md5
