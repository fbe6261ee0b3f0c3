"""Mistakes in fairseq's commands: each ends with one line, the problem and the fix, before anything is written."""

import shlex
import shutil

import pytest

from fairseq_deep.core.registry import UsageError
from tests.errors import assert_says, rows
from tests.helpers.commands import PACKAGE, refusal, run
from tests.helpers.flags import parse

ADAM = ("--arch", "transformer_dlcl_2l2l_tiny", "--optimizer", "adam", "--save-dir", "save")
BLEU = ("--eval-bleu", "--eval-bleu-args")


@pytest.mark.parametrize("before, flags, said", [
    *rows("flags"),
    pytest.param("", f"{BLEU[0]} {BLEU[1]} '{{\"max_len_b\": {'9' * 400}}}'",
                 "--eval-bleu-args: max_len_b must be a whole number from 0 to 1000000 (9...", id="400 digits"),
    pytest.param("", f"{BLEU[0]} {BLEU[1]} {'[' * 100_000}", "--eval-bleu-args: not JSON...", id="deeply nested"),
])  # fmt: skip
def test_flags_are_refused_as_soon_as_they_are_read(before, flags, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("there.pt", "run/checkpoint_last.pt"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError) as error:
        parse(*ADAM, *shlex.split(flags))
    assert_says(str(error.value), said)


SMALL = f"--user-dir {PACKAGE} --arch transformer_prenorm_2l2l_tiny --optimizer adam --lr 0.01 --max-tokens 400 " \
    "--max-update 1 --cpu"  # fmt: skip


@pytest.fixture(scope="module")
def splits(small, tmp_path_factory):
    """{name: data}: as they are, with an empty split, a word twice, sides of other lengths, another valid split ..."""
    folder = tmp_path_factory.mktemp("splits")
    found = {"small": small, **{name: folder / name for name in ("empty", "twice", "unequal", "more", "swapped")}}
    for name in list(found)[1:]:
        shutil.copytree(small, found[name])
    for each in found["empty"].glob("valid*.bin"):
        each.write_bytes(b"")
    (found["twice"] / "dict.src.txt").write_text("1 3\n1 3\n")
    for each in found["swapped"].glob("dict.*.txt"):
        first, second, *rest = each.read_text().splitlines(keepends=True)
        each.write_text("".join([second, first, *rest]))
    for each in small.glob("valid.src-tgt.tgt.*"):
        shutil.copy(each, found["unequal"] / each.name.replace("valid", "train"))
    for each in small.glob("valid*"):
        shutil.copy(each, found["more"] / each.name.replace("valid", "valid1"))
    return found


@pytest.fixture(scope="module")
def place(splits, tmp_path_factory):
    """A folder with the data, a checkpoint, and text."""
    folder = tmp_path_factory.mktemp("place")
    for name, data in splits.items():
        (folder / name).symlink_to(data)
    run("fairseq-train", splits["small"], *SMALL.split(), "--save-dir", folder / "save")
    (folder / "save/checkpoint_last.pt").rename(folder / "trained.pt")
    shutil.rmtree(folder / "save")
    for name, count in (("train.src", 3), ("train.tgt", 3), ("valid.src", 3), ("valid.tgt", 2), ("train.align", 4)):
        (folder / name).write_text("0-0\n" * count)
    (folder / "latin.src").write_bytes(b"a\n\xe4\n")
    return folder


@pytest.mark.parametrize("before, command, said", rows("trainings"))
def test_a_command_of_fairseq_is_refused(before, command, said, place):
    program, *words = shlex.split(command.replace("PACKAGE", str(PACKAGE)))
    if not program.startswith("fairseq-"):
        program, words = "fairseq-train", [program, *SMALL.split(), "--save-dir", "save", *words]
    there = {*place.iterdir()}
    done = run(program, *words, check=False, cwd=place)
    assert_says(refusal(done), said)
    lines = [line for line in done.text.splitlines() if "already been imported" not in line]  # a fork has the package
    assert len(lines) == 1 or not said.startswith("unknown architecture"), done.text
    assert not list(place.rglob("save/*.pt")) and {*place.iterdir()} - there <= {place / "save", place / "checkpoints"}


def test_an_unknown_precision_is_refused(place):
    flags = ["--path", "trained.pt", "--cpu", "--task", "deep_translation", "--decode-precision", "int4"]
    done = run("fairseq-generate", "small", "--user-dir", PACKAGE, *flags, check=False, cwd=place)
    assert done.returncode != 0 and "int4" in done.stderr


@pytest.mark.parametrize("data, flags", [
    ("small", "--num-batch-buckets 2"), ("more", "--combine-valid-subsets"),
    ("small", "--lr-scheduler polynomial_decay"),
    ("small", "--max-source-positions 6 --skip-invalid-size-inputs-valid-test"),
    ("small", "--task translation_from_pretrained_bart --langs src,tgt"),
])  # fmt: skip
def test_flags_of_fairseq_that_once_failed_train(data, flags, splits):
    flags = [*SMALL.split(), *flags.split(), "--no-save", "--log-format", "simple"]
    assert "num_updates 1" in run("fairseq-train", splits[data], *flags).stdout
