"""Fetching archives and rebuilding corpora; what goes wrong is one line, and nothing half-written is taken."""

import gzip
import hashlib
import html
import http.client
import io
import json
import multiprocessing
import resource
import urllib.parse
from collections import defaultdict
from types import SimpleNamespace

import pytest

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.recipe import Recipe
from fairseq_deep.recipes.text import fetch, rebuild
from tests.helpers.paths import ROOT
from tests.helpers.recipes import lines, pack

DESCRIPTIONS = sorted((ROOT / "examples").glob("*/*.json"))


def downloads(folder, **options):
    return fetch.Downloads(SimpleNamespace(options=Recipe(**options), path=lambda name: str(folder)))


def sgm(*lines):
    body = "\n".join(f'<seg id="{n}">{line}</seg>' for n, line in enumerate(lines, 1))
    return f'<refset><doc docid="x"><p>\n{body}\n</p></doc></refset>\n'


def make(tmp_path, url, description, langs=("en", "fi"), checksums=""):
    """Rebuild a corpus in ``tmp_path/corpus`` from archives at *url*."""
    options = Recipe(source_lang=langs[0], target_lang=langs[1], data_url=url, checksums=str(checksums))
    plan = SimpleNamespace(options=options, langs=langs, description=str(description),
                           path=lambda name: str(tmp_path / "archives"))  # fmt: skip
    rebuild.rebuild(plan, str(tmp_path / "corpus"))
    return tmp_path / "corpus"


def refuse(problem, tmp_path, *arguments, **options):
    """The corpus cannot be rebuilt, for this reason, and nothing of it is there."""
    with pytest.raises(UsageError) as error:
        make(tmp_path, *arguments, **options)
    assert problem in error.value.message and "\n" not in error.value.message
    assert not list(tmp_path.glob("corpus*/*")), "half a corpus"


def write_archives(corpus, home):
    """Write the archives of *corpus* with 24 lines in each member; return the lines of each set."""
    files, wanted = defaultdict(dict), {}
    for name, parts in corpus.sets.items():
        wanted[name] = []
        for part in (part for part in rebuild.as_list(parts) if "archive" in part):
            key, *others = rebuild.as_list(part["archive"])
            files.update({other: files[other] for other in others})
            names = part.get("text") or part.get("talks") or part.get("table", "")
            text = [f"Line {n} of {key} {names}".strip() for n in range(1, 25)]
            if "columns" in part:  # and a line without them; what is to be restored is in lower case
                rows = map(str.lower, text) if part.get("restore") else text
                table = "".join("\t".join([row] * (max(part["columns"].values()) + 1)) + "\n" for row in rows)
                files[key][names.replace("*", "00")] = gzip.compress(f"{table}broken\n".encode())
            for position, lang in enumerate(corpus.langs if "columns" not in part else ()):
                ways = [names[lang]] if isinstance(names, dict) else rebuild.as_list(names)
                member = ways[min(position + 1, len(ways) - 1)].format(lang=lang)  # as WMT16 has its test set
                content = "\n".join([*["<url>x</url>"] * ("talks" in part), *text]) + "\n"
                content = sgm(*map(html.escape, text)) if member.endswith((".sgm", ".xml")) else content
                files[key][f"x/{member}"] = gzip.compress(content.encode()) if member.endswith(".gz") else content
            wanted[name] += text
    assert files.keys() == corpus.archives.keys(), "an archive that no part uses"
    for key, (address, *own) in corpus.archives.items():
        path = home / (own or [address.rsplit("/", 1)[-1]])[0]
        if "" in files[key]:
            path.write_bytes(files[key][""])
        else:
            pack(path, files[key], mode="w:" if path.suffix == ".tar" else "w:gz")
    return wanted


@pytest.mark.parametrize("path", DESCRIPTIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_corpus_is_rebuilt(path, tmp_path, capsys):
    """From small archives, which come over https under names of their own; sacreBLEU knows the test sets."""
    found, home = rebuild.read_description(str(path)), tmp_path / "home"
    home.mkdir()
    found.pop("like", None)
    for parts in found.values():
        if "sample" in parts:
            parts["sample"] = 5
    description, langs, addresses = tmp_path / "description.json", found["languages"], found["archives"].values()
    description.write_text(json.dumps(found))
    corpus = rebuild.Corpus(found, langs, None)
    wanted = write_archives(corpus, home)
    train = wanted["train"]
    if "every" in found["valid"]:
        wanted.update(train=train[:22] + train[23:], valid=train[22:23])
    if "sample" in found.get("test1", ()):
        step = len(train) // 5
        wanted["test1"] = train[: 5 * step : step]
    rebuilt = make(tmp_path, home.as_uri(), description, langs)
    assert {each.name: lines(each) for each in rebuilt.iterdir()} == {
        f"{name}.{lang}": text for name, text in wanted.items() for lang in langs
    }
    tables = [part for parts in corpus.sets.values() for part in parts if "columns" in part]
    assert ("skipped 1 lines of " in capsys.readouterr().out) == bool(tables)
    assert {"train", "valid", "test"} <= set(wanted)
    assert {urllib.parse.urlsplit(address).scheme for address in addresses} == {"https"}
    assert len(list(home.iterdir())) == len(corpus.archives), "an archive has another's name"
    assert all(len(each) == 1 or each[2] for each in corpus.archives.values()), "a test set without a checksum"


def test_preprocessed_text_is_made_plain_again():
    pairs = [("talo .", "the house &apos;s x &amp; so on .")]
    assert [*rebuild.restored(iter(pairs), ("fi", "en"))] == [("Talo.", "The house's x & so on.")]


TABLE = {"languages": ["fi", "en"], "archives": {"table": "https://x.invalid/corpus.gz"},
         "train": [{"archive": "table", "columns": {"fi": 0, "en": 1}}],
         "valid": [{"sacrebleu": "wmt17"}], "test": [{"sacrebleu": "wmt18"}]}  # fmt: skip


@pytest.fixture
def table(tmp_path):
    """The arguments of `make` for a table and two test sets."""
    folder, description = tmp_path / "table", tmp_path / "table.json"
    folder.mkdir()
    description.write_text(json.dumps(TABLE))
    write_archives(rebuild.Corpus(json.loads(json.dumps(TABLE)), ("en", "fi"), None), folder)
    return folder.as_uri(), description


def cut(place):
    return lambda whole: whole[:place]


def sets(year, **files):
    return {f"test/newstest20{year}-enfi-{kind}.sgm": sgm(*text) for kind, text in files.items()}


@pytest.mark.parametrize("name, change, problem", [
    ("corpus.gz", lambda _: gzip.compress(b"yksi\tone\np\xe4\xe4\thead\n"), "corpus.gz is not UTF-8 (line 2)"),
    ("corpus.gz", cut(-6), "corpus.gz: truncated or invalid gzip archive"),
    ("wmt17-test.tgz", cut(200), "wmt17-test.tgz: truncated or invalid tar.gz archive"),
    ("wmt17-test.tgz", cut(-1), "wmt17-test.tgz: truncated or invalid tar.gz archive"),
    ("wmt17-test.tgz", lambda _: b"<html>quota</html>", "wmt17-test.tgz: truncated or invalid tar.gz archive"),
    ("wmt17-test.tgz", cut(0), "wmt17-test.tgz: the file is empty"), ("corpus.gz", None, "cannot download"),
    ("wmt17-test.tgz", sets(17, **{"src.en": "ab", "ref.fi": "a"}), "wmt17-test.tgz in 'fi' has 1: delete it"),
    ("wmt18-test.tgz", sets(18, **{"src.en": "ab"}), "wmt18-test.tgz lack test/newstest2018-enfi-ref.fi.sgm: delete"),
], ids=["latin-1", "truncated", "cut", "last byte", "other", "empty", "missing", "uneven", "one side"])  # fmt: skip
def test_a_bad_archive_is_refused_in_one_line_and_fetched_again(table, name, change, problem, tmp_path, capsys):
    given, fetched = tmp_path / "table" / name, tmp_path / "archives" / name
    whole = given.read_bytes()
    given.unlink()
    if isinstance(change, dict):
        pack(given, change)
    elif change:
        given.write_bytes(change(whole))
    refuse(problem, tmp_path, *table)
    assert fetched.exists() == ("delete" in problem or "line 2" in problem), "only a whole archive is kept"
    given.write_bytes(whole)
    fetched.unlink(missing_ok=True)
    make(tmp_path, *table)
    assert f"fetching {given.as_uri()}" in capsys.readouterr().out
    make(tmp_path, *table)
    assert "fetching" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_checksums_of_either_kind_are_verified(table, tmp_path, kind, capsys):
    sums, archives = tmp_path / "sums", tmp_path / "table"
    found = {path.name: hashlib.new(kind, path.read_bytes()).hexdigest() for path in archives.iterdir()}
    sums.write_text(f"{'0' * len(found['corpus.gz'])}  corpus.gz\n")
    refuse(f"{kind} is {found['corpus.gz']}, not 000", tmp_path, *table, checksums=sums)
    assert not list((tmp_path / "archives").iterdir())
    sums.write_text("# sums\n\n" + "".join(f"{digest}  {name}\n" for name, digest in found.items()))
    make(tmp_path, *table, checksums=sums)
    assert "not verified" not in capsys.readouterr().out


def test_known_sums_hold_where_the_archives_are_at_home(table, tmp_path, monkeypatch, capsys):
    """And sacreBLEU's own; there is none for a copy elsewhere."""
    assert "dev.tgz" in fetch.read_checksums(fetch.KNOWN)
    (tmp_path / "sums").write_text(f"{'0' * 64}  corpus.gz\n")
    monkeypatch.setattr(fetch, "KNOWN", str(tmp_path / "sums"))
    own = rebuild.of_sacrebleu("wmt18", ("en", "fi"))[0]
    for name, digest, known in (("corpus.gz", "", "0" * 64), ("wmt18-test.tgz", own[2], own[2])):
        given = f"{table[0]}/{name}", "", digest
        with pytest.raises(UsageError, match=f"not {known}; .* or skip the check with --checksums none"):
            downloads(tmp_path / "a").get(*given)
        assert not list((tmp_path / "a").iterdir())
        downloads(tmp_path / "b", checksums="none").get(*given)
        assert "(not verified, no known checksum)" in capsys.readouterr().out


def test_an_own_copy_that_is_damaged_is_refused_and_kept(tmp_path):
    (tmp_path / "corpus.gz").write_bytes(gzip.compress(b"one two three")[:-6])
    with pytest.raises(UsageError, match=r"corpus\.gz: truncated or invalid gzip archive .*; delete it, or put"):
        downloads(tmp_path).get("https://x.invalid/corpus.gz")
    assert (tmp_path / "corpus.gz").exists()


@pytest.mark.parametrize("problem", [
    http.client.IncompleteRead(b""), http.client.InvalidURL("a blank"), ConnectionRefusedError("no"),
], ids=lambda problem: type(problem).__name__)  # fmt: skip
def test_a_failed_download_is_taken_up_where_it_ended(problem, tmp_path, monkeypatch):
    """In some tries; here a connection is refused, then broken."""
    part, whole, asked, waits = tmp_path / "part", bytes(range(256)), [], []

    def urlopen(request, timeout):
        asked.append(request.headers.get("Range"))
        begin = int(asked[-1][6:-1]) if asked[-1] else 0
        if len(asked) == 1 or len(asked) > 3:
            raise problem
        answer = io.BytesIO(whole[begin : 100 if len(asked) == 2 else None])
        answer.status, answer.headers = 206 if begin else 200, {"Content-Length": len(whole) - begin}
        return answer

    monkeypatch.setattr(fetch.time, "sleep", waits.append)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", urlopen)
    fetch.download("http://127.0.0.1:9/x", str(part))
    assert asked == [None, None, "bytes=100-"] and len(waits) == 2 and part.read_bytes() == whole
    with pytest.raises(UsageError, match="cannot download http://127.0.0.1:9/x: .*again.*, or use --data DIR"):
        fetch.download("http://127.0.0.1:9/x", str(part))
    assert len(asked) == 3 + fetch.TRIES


def problem_below(most, tmp_path, table):
    """Why a corpus cannot be rebuilt in a process whose files have at most so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        make(tmp_path, *table)
    except (UsageError, OSError) as error:
        return str(error)


def test_a_full_disk_leaves_nothing_that_looks_whole(table, tmp_path):
    """A limit on the size of files stands for it: first an archive, then the text does not fit."""
    folder = tmp_path / "table"
    text = "".join(f"{n * 7919 % 10007} sana\t{n}\n" for n in range(20000))
    (folder / "corpus.gz").write_bytes(gzip.compress(text.encode()))
    size = (folder / "corpus.gz").stat().st_size
    for most, whole, problem in ((size // 2, False, "free disk space and run the same command again"),
                                 (size + 100, True, "File too large")):  # fmt: skip
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert problem in pool.apply(problem_below, (most, tmp_path, table))
        assert (tmp_path / "archives/corpus.gz").exists() == whole and not list(tmp_path.glob("corpus*"))
    make(tmp_path, *table)
