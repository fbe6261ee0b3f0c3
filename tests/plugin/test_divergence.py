"""A training that diverges says where, in one line, and can go back to its last checkpoint."""

import math
from types import SimpleNamespace

import pytest
from fairseq import safe_numbers

from fairseq_deep.recipes.compare import results
from tests.helpers.commands import losses, run, saved, train_command

FLAGS = ("--max-epoch", "2", "--max-tokens", "150", "--no-epoch-checkpoints")


def start(small, folder, *flags, poison=None):
    prepare = poison and ("tests.helpers.faults:poison", *poison)
    done = run(*train_command(small, folder, *FLAGS, *flags), check=False, prepare=prepare)
    return done.returncode, done.text


def assert_one_line(status, text, *parts):
    assert status == 1 and "Traceback" not in text and "StopIteration" not in text, text[-3000:]
    last = text.strip().splitlines()[-1]
    for part in (*parts, "--lr", "--warmup-updates", "--deep-init", "--layer-agg dlcl"):
        assert part in last, last


def test_a_learning_rate_that_is_far_too_high(small, tmp_path):
    status, text = start(small, tmp_path / "save", "--lr", "1e30", "--warmup-updates", "1", "--max-epoch", "9")
    assert_one_line(status, text, "diverged in update ")
    assert len([line for line in text.splitlines() if "INFO" not in line and "WARN" not in line.upper()]) < 130


@pytest.mark.parametrize("name, value, backward, place", [
    ("encoder.layers.1.fc1", math.nan, False, "first the output of encoder.layers.1.fc1"),
    ("decoder.layers.0.self_attn", math.inf, False, "first the output of decoder.layers.0.self_attn"),
    ("encoder.layers.0.fc2", math.inf, True, "first the gradient of the output of encoder.layers.0.fc"),
])  # fmt: skip
def test_the_module_where_it_began_is_named(small, tmp_path, name, value, backward, place):
    poison = (name, value, [3], backward)
    status, text = start(small, tmp_path / "save", poison=poison)
    assert max(losses(text)) == 2
    assert_one_line(status, text, "diverged in update 3: the gradient is not finite; ", place)


def updates_of(folder):
    return saved(folder)["optimizer_history"][-1]["num_updates"]


REWIND = ("--on-divergence", "rewind", "--save-interval-updates", "2")
MIDDLE = "encoder.layers.1.fc1"


def test_a_rewound_run_leaves_the_data_out(small, tmp_path):
    clean = tmp_path / "clean"
    assert start(small, clean)[0] == 0
    status, text = start(small, tmp_path / "save", *REWIND, poison=(MIDDLE, math.nan, [4]))
    assert status == 0 and "diverged in update 4" in text, text[-2000:]
    assert "checkpoint_last.pt, update 2; data read since then is skipped" in text
    assert updates_of(tmp_path / "save") == updates_of(clean) - 2, "of update 3 and of the one that diverged"
    model = saved(tmp_path / "save")["model"]
    assert all(value.isfinite().all() for name, value in model.items() if "_float_tensor" not in name)


@pytest.mark.parametrize("updates, rewinds, last", [([4] * 9, 3, 2), ([3, 3, 5, 5, 5, 7], 6, 8)], ids=["same", "later"])
def test_a_run_gives_up_only_where_rewinds_do_not_help(small, tmp_path, updates, rewinds, last):
    """After three at one place, with or without good updates between; later divergences are counted from zero."""
    flags = (*REWIND, "--max-epoch", "9", "--max-update", "8")
    status, text = start(small, tmp_path / "save", *flags, poison=(MIDDLE, math.nan, updates))
    if last == 2:
        assert_one_line(status, text, "diverged in update 4", "this happened again after 3 rewinds")
    assert status == (last == 2) and text.count("rewound to") == rewinds and updates_of(tmp_path / "save") == last


def test_two_processes_go_back_together(small, tmp_path):
    """The second one alone computes a NaN; both end with the same weights, which fairseq itself compares."""
    flags = ("--distributed-backend", "gloo", "--ddp-backend", "pytorch_ddp", "--max-tokens", "80", "--max-epoch", "2")
    command = train_command(small, tmp_path / "save", *FLAGS, *REWIND, *flags)
    done = run(*command, processes=2, prepare=("tests.helpers.faults:poison", MIDDLE, math.nan, [4], False, "1"))
    assert done.text.count("diverged in update 4: ") == 2, done.text[-2000:]
    assert done.text.count("checkpoint_last.pt, update 2; data read since then is skipped") == 2
    assert f"first the output of {MIDDLE}" in done.text and "all values of process 0 are finite" in done.text
    updates = [*losses(done)]
    assert updates == list(range(1, len(updates) + 1)) and len(updates) > 4


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(small, tmp_path):
    status, text = start(small, tmp_path / "save", "--on-divergence", "rewind", poison=(MIDDLE, math.nan, [2]))
    assert_one_line(status, text, "diverged in update 2", "no checkpoint to rewind to yet: lower --save-int")


@pytest.mark.parametrize("error, said", [
    ("Minimum loss scale reached (0.0001). Your loss is ...", "the loss scale fell to its minimum; here"),
    ("gradients are Nan/Inf", "the gradient is not finite; here"),
    ("Fatal error: gradients are inconsistent between workers. Try --ddp-backend=legacy_ddp.\n---", "inconsistent"),
])  # fmt: skip
def test_each_kind_has_its_words(monkeypatch, error, said):
    """The loss scale is one of fp16."""
    trainer = SimpleNamespace(get_num_updates=lambda: 6)
    monkeypatch.setattr(safe_numbers, "first_not_finite", lambda *_: "here")
    found = safe_numbers.explain(trainer, [], FloatingPointError(error), {})
    assert "update 7: " in found.one_line and said in found.one_line and "\n" not in found.one_line
    assert results.diverged(found.one_line) == (said != "inconsistent"), "comparisons tell it from a failed machine"


def test_a_gradient_that_fp16_cannot_hold_leaves_its_update_out(small, tmp_path):
    """On a CPU, too: the loss scale falls until gradients fit, as it does whenever it has grown too far."""
    flags = ["--memory-efficient-fp16", "--fp16-init-scale", str(2**22), "--max-update", "3", "--max-epoch", "20"]
    done = run(*train_command(small, tmp_path / "save", *FLAGS, *flags))
    assert "gradient overflow detected" in done.text and updates_of(tmp_path / "save") == 3
