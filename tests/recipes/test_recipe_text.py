"""The text that the recipes read: what is refused, what is cleaned, and what is said about it."""

import gzip
import io
import os
import subprocess
import tarfile

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.recipes import LANGS, assert_refused, check, program, write_pairs


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    pairs = [(f"word {n}", f"Wort {n}") for n in range(200)]
    write_pairs(folder, train=pairs[:100], valid=pairs[100:110], test=pairs[110:120])
    return folder


def test_a_byte_order_mark_is_no_part_of_the_first_word(data, tmp_path):
    path = data / "train.de"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert check(data, tmp_path / "out").returncode == 0
    assert (tmp_path / "out/train.de").read_bytes().startswith(b"Wort 0\n")


@pytest.mark.parametrize("place", [2, 40, 300])
def test_a_damaged_gzip_file_is_one_line_wherever_it_is_damaged(data, tmp_path, place):
    whole = bytearray(gzip.compress(os.urandom(400).hex().encode() + b"\n"))
    whole[place : place + 8] = b"\xff" * 8
    (data / "train.de").unlink()
    (data / "train.de.gz").write_bytes(whole)
    assert_refused(check(data, tmp_path / "out"), "train.de.gz")


def test_one_text_on_both_sides_is_refused(data, tmp_path):
    (data / "valid.de").write_bytes((data / "valid.en").read_bytes())
    assert_refused(check(data, tmp_path / "out"), "valid.en and valid.de have the same text")
    assert not (tmp_path / "out").exists()


def test_what_makes_a_score_mean_less_is_said(data, tmp_path):
    assert "note" not in check(data, tmp_path / "out").stdout
    pairs = [(f"word {n}", f"Wort {n}") for n in range(100)]
    write_pairs(data, train=[*pairs, *[("same", "same")] * 5], test=[pairs[3], pairs[3], ("new", "neu")])
    said = check(data, tmp_path / "out").stdout
    assert "note: 5 % of the training pairs have the same text on both sides" in said
    assert "note: 2 of 3 test sources are also training sources" in said and "valid sources" not in said


class TestLengths:
    """Before anything is trained: what would stop a training, a validation or a translation later."""

    @staticmethod
    def check(folder, tokens=50, positions=(40, 30)):
        return program("corpus", "--lengths", folder, "--max-tokens", tokens, "--positions", *positions)

    @pytest.mark.parametrize("split, side, words, parts", [
        ("train", 0, 50, ("train.en, line 101", "51 sub-words, more than 50", "or set --max-words lower")),
        ("valid", 0, 40, ("valid.en, line 11", "more than 40", "--max-source-positions", "shorten the line")),
        ("valid", 1, 30, ("valid.de, line 11", "more than 30", "--max-target-positions")),
        ("test", 1, 30, ("test.de, line 11", "31 sub-words, more than 30", "--max-target-positions")),
    ])  # fmt: skip
    def test_too_long(self, data, split, side, words, parts):
        for index, lang in enumerate(LANGS):
            with open(data / f"{split}.{lang}", "a") as stream:
                stream.write("a " * (words if index == side else 1) + "\n")
        assert_refused(self.check(data), *parts)

    def test_a_batch_smaller_than_the_positions(self, data):
        with open(data / "valid.en", "a") as one, open(data / "valid.de", "a") as other:
            one.write("a " * 20 + "\n")
            other.write("b\n")
        assert_refused(self.check(data, tokens=20), "valid.en, line 11", "more than 20", "raise --max-tokens")

    def test_just_short_enough(self, data):
        for split, words in (("train", (49, 49)), ("valid", (39, 29)), ("test", (39, 29))):
            for lang, count in zip(LANGS, words):
                with open(data / f"{split}.{lang}", "a") as stream:
                    stream.write("a " * count + "\n")
        assert self.check(data).returncode == 0


def test_pairs_of_the_archive_stay_pairs_where_a_line_holds_a_lone_return(tmp_path):
    """fairseq-preprocess would take it for the end of a line."""
    names = {"train": "train.tok.clean", "valid": "newstest2013.tok", "test": "newstest2014.tok"}
    with tarfile.open(tmp_path / "wmt.tar.gz", "w:gz") as archive:
        for split, name in names.items():
            for lang in LANGS:
                text = f"a {lang}\nb\r{lang}\x0bx\n\nd {lang}\r\n" if split == "train" else f"e {lang}\n"
                info = tarfile.TarInfo(f"{name}.bpe.32000.{lang}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    done = program("wmt16_tar", "--tar", tmp_path / "wmt.tar.gz", "--out", tmp_path / "text")
    assert done.returncode == 0, done.stderr
    for lang in LANGS:
        with open(tmp_path / f"text/bpe/train.{lang}") as stream:  # as fairseq-preprocess opens it
            assert stream.read().split("\n") == [f"a {lang}", f"b {lang} x", "", f"d {lang}", ""]
    assert sorted(path.name for path in (tmp_path / "text/bpe").iterdir()) == [
        "data.json", "test.de", "test.en", "train.de", "train.en", "valid.de", "valid.en",
    ]  # fmt: skip


def recipe(*words, **environment):
    command = [ROOT / "run_wmt16_ende.sh", "--dry-run", "--ngpu", "0", *words]
    env = {**os.environ, "FAIRSEQ_DEEP_ENV": "current", **environment}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=env)


def test_a_folder_that_no_recipe_has_made_is_not_written_to(data, tmp_path):
    exp = tmp_path / "mine"
    (exp / "text/raw").mkdir(parents=True)
    (exp / "text/raw/precious").write_text("mine")
    assert_refused(recipe("--exp", exp, "--data", data), "has a text that was not written by a recipe", status=2)
    (exp / "cmd.sh").touch()
    assert recipe("--exp", exp, "--data", data).returncode == 0


@pytest.mark.parametrize("place", ["text/raw", "text/bpe"])
def test_the_text_of_an_experiment_is_not_its_own_source(data, tmp_path, place):
    exp = tmp_path / "exp"
    (exp / place).parent.mkdir(parents=True)
    data.rename(exp / place)
    (exp / "cmd.sh").touch()
    (tmp_path / "link").symlink_to(exp / place)
    for path in (exp / place, tmp_path / "link"):
        assert_refused(recipe("--exp", exp, "--data", path), "must not be the copy of the text", status=2)


def test_cdpath_is_of_no_consequence(data, tmp_path):
    (tmp_path / "examples").mkdir()
    done = recipe("--exp", tmp_path / "exp", "--data", data, CDPATH=f"{tmp_path}:.")
    assert done.returncode == 0 and done.stderr == "" and "fairseq-train" in done.stdout


@pytest.mark.parametrize("flag, value", [
    ("--max-tokens", "08"), ("--max-tokens", "0"), ("--beam", "0"), ("--workers", "0"), ("--gen-batch", "0"),
    ("--update-freq", "0"), ("--batch-tokens", "0"), ("--max-words", "0"), ("--seed", "007"), ("--ngpu", "01"),
])  # fmt: skip
def test_numbers_that_mean_nothing(flag, value):
    assert_refused(recipe(flag, value), f"{flag} must be a", f"'{value}'", status=2)
