"""The files of the demo corpus: sizes, no sentence twice, word frequencies, the same bytes again, bad arguments."""

import hashlib
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers.paths import ROOT

DEMO = ROOT / "examples/demo"


def run(*arguments):
    command = [sys.executable, str(DEMO / "make_corpus.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def read(folder, split):
    return tuple((folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de"))


def digest(folder):
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The corpus as the recipe makes it, and what the command printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = run("--out", folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_counts_and_printed_table(corpus):
    folder, printed = corpus
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{split}.{language}" for split in ("train", "valid", "test") for language in ("en", "de")
    )
    for split, pairs in (("train", 22000), ("valid", 500), ("test", 500)):
        english, expected = read(folder, split)
        assert len(english) == len(expected) == pairs
    rows = printed.splitlines()
    assert [row.split()[0] for row in rows] == ["split", "train", "valid", "test"]
    assert rows[1].split()[1] == "22000"


def test_no_sentence_of_either_language_occurs_twice(corpus):
    for language in (0, 1):
        lines = [line for split in ("train", "valid", "test") for line in read(corpus[0], split)[language]]
        assert len(lines) == len(set(lines)) == 23000


def words(lines):
    return Counter(word.strip(".,?").lower() for line in lines for word in line.split())


@pytest.mark.parametrize("language", [0, 1], ids=["en", "de"])
def test_lengths_and_word_frequencies(corpus, language):
    lines = read(corpus[0], "train")[language]
    lengths = [len(line.split()) for line in lines]
    assert min(lengths) >= 4 and max(lengths) <= 16 and 7 < sum(lengths) / len(lines) < 10
    counts = words(lines)
    assert 250 <= len(counts) <= 500
    assert min(counts.values()) >= 10 and sum(count >= 30 for count in counts.values()) >= 0.95 * len(counts)
    for split in ("valid", "test"):
        assert not words(read(corpus[0], split)[language]).keys() - counts.keys()


def test_a_copy_of_the_source_scores_next_to_nothing(corpus):
    sacrebleu = pytest.importorskip("sacrebleu")
    english, expected = read(corpus[0], "test")
    assert sacrebleu.corpus_bleu(english, [expected]).score < 5
    assert sacrebleu.corpus_bleu(expected, [expected]).score > 99.9


# Changes with the grammar and with nothing else: not with the Python, not with the machine.
CORPUS_SHA256 = "3d9aaa798ba104391030de715d629f38bf7da75bc140efaa1b83353053a2e088"


def test_the_default_corpus_is_the_same_on_every_python_and_machine(corpus):
    assert digest(corpus[0]) == CORPUS_SHA256


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    sizes = ("--train", 300, "--valid", 20, "--test", 20)
    digests = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert run("--out", tmp_path / name, *sizes, "--seed", seed).returncode == 0
        digests.append(digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_a_larger_training_set_leaves_valid_and_test_as_they_are(tmp_path):
    for size in (100, 200):
        assert run("--out", tmp_path / str(size), "--train", size, "--valid", 30, "--test", 30).returncode == 0
    for split in ("valid", "test"):
        assert read(tmp_path / "100", split) == read(tmp_path / "200", split)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", 0], "--train must be at least 1"),
        (["--valid", "many"], "invalid int value"),
        (["--train", 10_000_000], "at most"),
        (["--seed", -1], "--seed must not be negative"),
    ],
)
def test_bad_arguments_get_one_line_and_write_nothing(tmp_path, arguments, message):
    done = run("--out", tmp_path / "new", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_an_out_that_is_a_file_is_refused_and_kept(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    done = run("--out", taken)
    assert done.returncode == 2 and "is a file" in done.stderr and taken.read_text() == "mine"


def test_a_folder_in_the_place_of_a_file_leaves_the_old_files_alone(tmp_path):
    (tmp_path / "valid.de").mkdir()
    (tmp_path / "train.en").write_text("mine")
    done = run("--out", tmp_path, "--train", 10, "--valid", 5, "--test", 5)
    assert done.returncode == 1 and "valid.de is a folder" in done.stderr and len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.en", "valid.de"]
    assert (tmp_path / "train.en").read_text() == "mine"


def test_without_out_the_usage_error_is_one_line():
    done = run()
    assert done.returncode == 2 and "--out" in done.stderr and len(done.stderr.splitlines()) == 1


def test_hops(tmp_path):
    """The answers, by the definition: look up the symbol in the table, as often as the source says."""
    given = ("--out", tmp_path, "--train", "300", "--valid", "60", "--test", "60", "--hops", "6")
    assert run(*given).returncode == 0
    first, sources = digest(tmp_path), []
    for split in ("train", "valid", "test"):
        for source, target in zip(*read(tmp_path, split)):
            hops, *table = source.split()
            images = {f"s{letter}": image for letter, image in zip("abcdefghijklmnop", table, strict=True)}
            answers = []
            for symbol in images:
                for _ in range(int(hops[1:])):
                    symbol = images[symbol]
                answers.append(symbol)
            assert " ".join(answers) == target
            sources.append(source)
    assert len(set(sources)) == 420 and Counter(source.split()[0] for source in sources) == {
        f"h{n}": 70 for n in range(1, 7)
    }
    assert run(*given).returncode == 0 and digest(tmp_path) == first
    assert run(*given[:-1], "-1").stderr.startswith("make_corpus.py: --hops must not be negative")


def test_the_sentence_of_the_docs_is_one_of_the_grammar(corpus):
    """The sentence of the docs has words and a construction of the grammar, and is not in the training text."""
    known = {word for line in read(corpus[0], "train")[0] for word in line.split()}
    sentence = "The old house is beautiful."
    assert {*sentence.split()} <= known and sentence not in read(corpus[0], "train")[0]
    assert f"'{sentence}' | fairseq-deep translate exp/demo" in (ROOT / "examples/README.md").read_text()
