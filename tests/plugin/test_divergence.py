"""A training that diverges says where, in one line, and can go back to its last checkpoint."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import safe_numbers

from fairseq_deep.recipes.compare import results
from tests.helpers import faults
from tests.helpers.commands import PACKAGE, losses_in, run, train_command

FLAGS = ("--max-epoch", "2", "--num-workers", "0", "--max-tokens", "150", "--no-epoch-checkpoints")


def start(small, folder, *flags, poison=None):
    log = folder.with_name(folder.name + ".log")
    prepare = ("poison", *poison) if poison else None
    status = faults.train(train_command(small, folder, *FLAGS, *flags), log, prepare)
    return status, log.read_text()


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
    assert max(losses_in((tmp_path / "save.log").read_text())) == 2
    assert_one_line(status, text, "diverged in update 3: the gradient is not finite; ", place)


def last(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


REWIND = ("--on-divergence", "rewind", "--save-interval-updates", "2")
MIDDLE = "encoder.layers.1.fc1"


def test_it_goes_back_and_leaves_the_data_out(small, tmp_path):
    clean = tmp_path / "clean"
    assert start(small, clean)[0] == 0
    updates = last(clean)["optimizer_history"][-1]["num_updates"]
    status, text = start(small, tmp_path / "save", *REWIND, poison=(MIDDLE, math.nan, [4]))
    assert status == 0, text[-2000:]
    assert "diverged in update 4" in text
    assert "checkpoint_last.pt, update 2; data read since then is skipped" in text
    state = last(tmp_path / "save")
    assert state["optimizer_history"][-1]["num_updates"] == updates - 2, "of update 3 and of the one that diverged"
    assert all(torch.isfinite(value).all() for name, value in state["model"].items() if "_float_tensor" not in name)


def test_it_gives_up_where_going_back_does_not_help(small, tmp_path):
    status, text = start(small, tmp_path / "save", *REWIND, "--max-epoch", "9", poison=(MIDDLE, math.nan, [3] * 9))
    assert_one_line(status, text, "diverged in update 3", "this happened again after 3 rewinds")
    assert text.count("rewound to") == 3 and last(tmp_path / "save")["optimizer_history"][-1]["num_updates"] == 2


def test_later_divergences_are_counted_from_zero(small, tmp_path):
    poison = (MIDDLE, math.nan, [3, 3, 5, 5, 5, 7])
    status, text = start(small, tmp_path / "save", *REWIND, "--max-epoch", "9", "--max-update", "8", poison=poison)
    assert status == 0 and text.count("rewound to") == 6, text[-2000:]
    assert last(tmp_path / "save")["optimizer_history"][-1]["num_updates"] == 8


POISON = """
import os, sys
import fairseq_deep
sys.path.insert(0, {root!r})
from tests.helpers import faults
if os.environ["RANK"] == "1":
    faults.poison({module!r}, float("nan"), [4])
"""


def test_two_processes_go_back_together(small, tmp_path):
    """The second one alone computes a NaN; both end with the same weights, which fairseq itself compares."""
    (tmp_path / "poisoned").mkdir()
    (tmp_path / "poisoned/__init__.py").write_text(POISON.format(root=str(PACKAGE.parent), module=MIDDLE))
    flags = ("--distributed-backend", "gloo", "--ddp-backend", "pytorch_ddp", "--max-tokens", "80", "--max-epoch", "2")
    command = train_command(small, tmp_path / "save", *FLAGS, *REWIND, *flags)
    done = run(*command, "--user-dir", tmp_path / "poisoned", processes=2)
    text = done.stdout + done.stderr
    assert text.count("diverged in update 4: ") == 2, text[-2000:]
    assert text.count("checkpoint_last.pt, update 2; data read since then is skipped") == 2
    assert f"first the output of {MIDDLE}" in text and "all values of process 0 are finite" in text
    assert list(losses_in(text)) == list(range(1, len(losses_in(text)) + 1)) and len(losses_in(text)) > 4


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
    text = done.stdout + done.stderr
    assert "gradient overflow detected" in text and "done training" in text
    state = torch.load(tmp_path / "save/checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] == 3
