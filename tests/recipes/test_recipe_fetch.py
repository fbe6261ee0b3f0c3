"""Fetching archives, and descriptions of corpora: what goes wrong is one line, and nothing half-written is taken."""

import gzip
import http.client
import json
import resource
import urllib.parse
from pathlib import Path

import pytest

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import record
from fairseq_deep.recipes.text import fetch as fetching
from fairseq_deep.recipes.text import rebuild as rebuilding
from fairseq_deep.recipes.text import wmt16_tar
from tests.helpers.paths import ROOT
from tests.helpers.recipes import assert_refused, pack, program, sgm

DESCRIPTIONS = sorted((ROOT / "examples").glob("*/*.json"))
TABLE = {
    "languages": ["fi", "en"],
    "archives": {"table": "https://x.invalid/corpus.gz"},
    "train": [{"archive": "table", "columns": {"fi": 0, "en": 1}}],
    "valid": [{"sacrebleu": "wmt17"}],
    "test": [{"sacrebleu": "wmt18"}],
}


@pytest.fixture
def home(tmp_path):
    """A table, and the test sets beside it."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "corpus.json").write_text(json.dumps(TABLE))
    write_table(folder, b"yksi\tone\nkaksi\ttwo\n")
    for year in (17, 18):
        names = [f"test/newstest20{year}-enfi-{kind}.sgm" for kind in ("src.en", "ref.fi")]
        pack(folder / f"wmt{year}-test.tgz", {name: sgm("a", "b") for name in names})
    return folder


def write_table(folder, content):
    (folder / "corpus.gz").write_bytes(gzip.compress(content))


def rebuild(home, *words, **how):
    folder = home.parent
    places = ["--url", home.as_uri(), "--archives", folder / "archives", "--out", folder / "out"]
    return program("rebuild", "--corpus", folder / "corpus.json", *places, *words, langs=("en", "fi"), **how)


def test_a_table_is_taken_apart(home):
    done = rebuild(home)
    assert done.returncode == 0, done.stderr
    assert (home.parent / "out/train.fi").read_text() == "yksi\nkaksi\n"
    assert (home.parent / "out/test.en").read_text() == "a\nb\n"


@pytest.mark.parametrize("content, parts", [
    (b"yksi\tone\n" + "pää\thead\n".encode("latin-1"), ["corpus.gz, line 2: not UTF-8"]),
    (None, ["corpus.gz: truncated or invalid gzip archive", "the download was deleted"]),
    (b"", ["train.en and", "have no sentence pairs"]),
])  # fmt: skip
def test_a_bad_table_is_one_line(home, content, parts):
    if content is None:
        (home / "corpus.gz").write_bytes((home / "corpus.gz").read_bytes()[:-6])
    else:
        write_table(home, content)
    done = rebuild(home)
    if not content and content is not None:  # an empty table is one: the next program says that there is no text
        done = program("corpus", "--data", home.parent / "out", "--out", home.parent / "raw", langs=("en", "fi"))
    else:
        assert not (home.parent / "out").exists() and not (home.parent / "out.new").exists()
    assert_refused(done, *parts)


def test_an_own_copy_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "corpus.gz").write_bytes(gzip.compress(b"one two three")[:-6])
    with pytest.raises(UsageError, match=r"corpus\.gz: truncated or invalid gzip archive .*; delete it, or put"):
        fetching.fetch("https://x.invalid/corpus.gz", "corpus.gz", str(tmp_path), {})
    assert (tmp_path / "corpus.gz").exists()


def test_sides_of_different_lengths_are_refused(home):
    files = {"test/newstest2017-enfi-src.en.sgm": sgm("a", "b"), "test/newstest2017-enfi-ref.fi.sgm": sgm("a")}
    pack(home / "wmt17-test.tgz", files)
    assert_refused(rebuild(home), "wmt17 has more lines in one language than in the other")
    assert not (home.parent / "out").exists()


def test_a_member_that_is_missing_is_named(home):
    pack(home / "wmt18-test.tgz", {"test/newstest2018-enfi-src.en.sgm": sgm("a", "b")})
    assert_refused(rebuild(home), "wmt18-test.tgz lack wmt18 in 'fi'")


def test_a_full_disk_leaves_nothing_that_looks_whole(home):
    """A limit on the size of files stands for it: first an archive, then the text does not fit."""
    write_table(home, "".join(f"{n * 7919 % 10007} sana\t{n}\n" for n in range(20000)).encode())
    size = (home / "corpus.gz").stat().st_size

    def limited(most):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = rebuild(home, preexec_fn=limited(size // 2))
    assert_refused(done, "corpus.gz.part", "free disk space and run the same command again")
    assert not (home.parent / "archives/corpus.gz").exists() and not (home.parent / "out").exists()
    done = rebuild(home, preexec_fn=limited(size + 100))
    assert_refused(done, "File too large")
    assert (home.parent / "archives/corpus.gz").exists() and not list(home.parent.glob("out*"))
    assert rebuild(home).returncode == 0


def test_sacrebleus_own_sums_hold_where_its_own_archives_are_fetched(home, monkeypatch):
    archives = rebuilding.Archives({}, ("en", "fi"), str(home.parent / "archives"), "", {})
    monkeypatch.setattr(fetching, "download", lambda url, part: Path(part).write_bytes(b"<html>"))
    with pytest.raises(UsageError, match="not f996c245ecffea23d0006fa4c34e9064"):
        archives.of_sacrebleu("wmt18")
    assert not list((home.parent / "archives").iterdir())


def test_no_network_is_one_line(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(fetching.time, "sleep", waits.append)
    with pytest.raises(UsageError, match="cannot download http://127.0.0.1:9/x.tgz: .*, or use --data DIR"):
        fetching.fetch("http://127.0.0.1:9/x.tgz", "x.tgz", str(tmp_path), {})
    assert len(waits) == 3 and not (tmp_path / "x.tgz").exists()


@pytest.mark.parametrize("problem", [http.client.IncompleteRead(b""), http.client.InvalidURL("a blank")])
def test_a_cut_connection_is_tried_again(problem, tmp_path, monkeypatch):
    """http.client's errors are no OSError."""
    answers = [problem, problem, None]

    def stream(url, part):
        answer = answers.pop(0)
        if answer:
            raise answer

    monkeypatch.setattr(fetching.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(fetching, "stream_to_file", stream)
    fetching.download("http://127.0.0.1:9/x y", str(tmp_path / "part"))
    answers[:] = [problem] * fetching.TRIES
    with pytest.raises(UsageError, match="cannot download http://127.0.0.1:9/x y: .*run the same command again"):
        fetching.download("http://127.0.0.1:9/x y", str(tmp_path / "part"))


def test_numbers_of_lines():
    assert wmt16_tar.parse_lines("train=2-5,test=3") == {"train": (2, 5), "test": (3, 3)}
    for text in ("train=-5", "train=5-", "train=", "more=5", "train=1-2-3"):
        with pytest.raises(UsageError, match="--data-lines must be SET=N or SET=MIN-MAX"):
            wmt16_tar.parse_lines(text)


@pytest.mark.parametrize("path", DESCRIPTIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_description_is_whole(path):
    """Its archives are used, come over https under names of their own, and sacreBLEU knows its test sets."""
    from sacrebleu.dataset import DATASETS

    found = rebuilding.read_description(str(path))
    sets = {name: parts for name, parts in found.items() if rebuilding.SETS.fullmatch(name)}
    parts = [part for some in sets.values() if isinstance(some, list) for part in some]
    used = {key for part in parts for key in rebuilding.as_list(part.get("archive", []))}
    assert {"train", "valid", "test"} <= set(sets) and used == set(found["archives"])
    addresses = [urllib.parse.urlsplit(address) for address in found["archives"].values()]
    assert all(address.scheme == "https" for address in addresses)
    assert len({address.path.rsplit("/", 1)[-1] for address in addresses}) == len(addresses)
    one, two = found["languages"]
    for name in (part["sacrebleu"] for part in parts if "sacrebleu" in part):
        assert {f"{one}-{two}", f"{two}-{one}"} & set(DATASETS[name].langpairs) and DATASETS[name].md5


def test_a_package_that_a_later_stage_needs_is_asked_for_first():
    record.check_packages(["sacremoses"])
    with pytest.raises(UsageError, match="this recipe requires no_such_package: run "):
        record.check_packages(["sacremoses", "no_such_package"])
