"""The demo corpus: its bytes, which hold the whole grammar; sentences checked by hand, bad arguments, and the hops."""

import hashlib
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers.paths import ROOT

DEMO = ROOT / "examples/demo"
# Changes with the grammar and with nothing else: not with the Python, not with the machine.
CORPUS_SHA256 = "3d9aaa798ba104391030de715d629f38bf7da75bc140efaa1b83353053a2e088"
CHECKED = (ROOT / "tests/data/demo_sentences.txt").read_text(encoding="utf-8").splitlines()[1:]


def run(*arguments):
    command = [sys.executable, str(DEMO / "make_corpus.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def make(folder, *arguments):
    """Write a corpus, and return the sum of its files."""
    done = run("--out", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()


def read(folder, split):
    return tuple((folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """English and German of the training set as the recipe makes it, which is the same everywhere."""
    folder = tmp_path_factory.mktemp("demo")
    assert make(folder) == CORPUS_SHA256
    return read(folder, "train")


@pytest.mark.parametrize("line", CHECKED, ids=[line.partition(" | ")[0] for line in CHECKED])
def test_sentences_were_checked_by_hand(line, corpus):
    _, english, german = line.split(" | ")
    assert corpus[1][corpus[0].index(english)] == german


def test_another_seed_gives_other_bytes_and_a_larger_training_set_the_same_test_set(tmp_path):
    sizes = ("--valid", 20, "--test", 20, "--train")
    first, other = (make(tmp_path / str(seed), *sizes, 100, "--seed", seed) for seed in (5, 6))
    assert first != other
    make(tmp_path / "larger", *sizes, 200, "--seed", 5)
    assert all(read(tmp_path / "5", split) == read(tmp_path / "larger", split) for split in ("valid", "test"))


@pytest.mark.parametrize("words, problem", [
    ("", "--out"), ("--out new --train 0", "--train must be at least 1"),
    ("--out new --valid many", "invalid int value"),
    ("--out new --train 10000000", "at most"), ("--out new --seed -1", "--seed must not be negative"),
    ("--out new --hops -1", "--hops must not be negative"), ("--out file", "is a file"),
    ("--out folder --train 10 --valid 5 --test 5", "valid.de is a folder"),
])  # fmt: skip
def test_bad_arguments_get_one_line_and_write_nothing(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder/valid.de").mkdir(parents=True)
    for name in ("folder/train.en", "file"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = run(*words.split())
    assert done.returncode == (1 if "folder" in words else 2), done.stderr
    assert problem in done.stderr and len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "folder/train.en").read_text() == "mine"


def test_hops(tmp_path):
    """The answers, by the definition: look up the symbol in the table, as often as the source says."""
    given = ("--train", "300", "--valid", "60", "--test", "60", "--hops", "6")
    first, sources = make(tmp_path / "a", *given), []
    for split in ("train", "valid", "test"):
        for source, target in zip(*read(tmp_path / "a", split)):
            hops, *table = source.split()
            images = {f"s{letter}": image for letter, image in zip("abcdefghijklmnop", table, strict=True)}
            answers = []
            for symbol in images:
                for _ in range(int(hops[1:])):
                    symbol = images[symbol]
                answers.append(symbol)
            assert " ".join(answers) == target
            sources.append(source)
    counts = Counter(source.split()[0] for source in sources)
    assert len(set(sources)) == 420 and counts == {f"h{n}": 70 for n in range(1, 7)}
    assert make(tmp_path / "b", *given) == first
