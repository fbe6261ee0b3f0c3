"""``examples/grow.sh``: a training for each depth, killed in the middle and started again."""

import os
import signal
import subprocess

import pytest
import torch

from tests.helpers.commands import EXACT, train_command
from tests.helpers.paths import ROOT
from tests.helpers.processes import until

SCRIPT = ROOT / "examples/grow.sh"


def words(data, folder, depths="1,2,4", updates=60, warmup=3, flags=()):
    """The command; the flags of `train_command` that the script gives itself are left to the script."""
    _, _, _, _, *given = train_command(data, "-", "--save-interval-updates", "1", "--keep-interval-updates", "1",
                                       "--no-epoch-checkpoints", "--disable-validation", *EXACT,
                                       arch="transformer_prenorm_2l2l_tiny")  # fmt: skip
    return [str(word) for word in (SCRIPT, data, folder, depths, updates, warmup, *given, *flags)]


def grow(*arguments, last="", order="", **options):
    env = {**os.environ, "LAST": last, "ORDER": order}
    return subprocess.run(words(*arguments, **options), capture_output=True, text=True, env=env, timeout=300)


COOLDOWN = "--lr-scheduler inverse_sqrt_cooldown --cooldown-updates 5"


def last_of(folder, depth):
    return torch.load(folder / f"{depth}/checkpoint_last.pt", weights_only=False)


def updates_of(folder, depth):
    return last_of(folder, depth)["optimizer_history"][-1]["num_updates"]


def killed(pids, data, folder):
    """Kill all processes while the second depth trains; return how far it is."""
    pids.mkdir()
    env = {**os.environ, "LAST": COOLDOWN, "PIDS": str(pids)}
    child = subprocess.Popen(words(data, folder), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: list(folder.glob("2/checkpoint_*_5.pt")))
    child.kill()
    os.kill(int((pids / "fairseq-train.").read_text()), signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    return updates_of(folder, 2)


def test_three_depths_killed_in_the_second_one(programs, small, tmp_path):
    whole = grow(small, tmp_path / "whole", last=COOLDOWN)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert [updates_of(tmp_path / "whole", depth) for depth in (1, 2, 4)] == [20, 23, 23]
    text = whole.stdout + whole.stderr
    assert "encoder layers 1 1, decoder layers 1 2; " in text
    assert "encoder layers 1 1 2 2, decoder layers 1 2; " in text
    assert text.count("training starts at update 3, lr 0.002") == 2
    reached = killed(tmp_path / "pids", small, tmp_path / "parts")
    assert 4 <= reached < 23 and not (tmp_path / "parts/2/done").exists() and (tmp_path / "parts/1/done").exists()
    rest = grow(small, tmp_path / "parts", last=COOLDOWN)
    assert rest.returncode == 0 and rest.stdout.startswith("2 layers: 20 updates\n"), rest.stderr[-2000:]
    first, second = (last_of(tmp_path / name, 4)["model"] for name in ("whole", "parts"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert last_of(tmp_path / "whole", 4)["cfg"]["lr_scheduler"]["_name"] == "inverse_sqrt_cooldown"
    assert sum(name.endswith("fc1.weight") and name.startswith("encoder") for name in first) == 4
    again = grow(small, tmp_path / "parts", last=COOLDOWN)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    other = grow(small, tmp_path / "parts", last=COOLDOWN, flags=["--lr", "1"])
    problem = f"{tmp_path}/parts/1 was trained with another command ({tmp_path}/parts/1/command.txt)"
    assert other.returncode == 2 and other.stderr == f"grow.sh: {problem}: give the same, or another FOLDER\n"


@pytest.mark.parametrize("settings, problem", [
    ({"depths": "6,3"}, "DEPTHS must increase, not '6,3'"),
    ({"depths": "6;12"}, "DEPTHS must be whole numbers with commas, not '6;12'"),
    ({"warmup": 0}, "UPDATES and WARMUP must be whole numbers from 1 on"),
    ({"warmup": 20}, "WARMUP 20 must be less than the 20 updates of a depth"),
    ({"updates": 2}, "UPDATES 2 must be at least one for each of 3 depths"),
    ({"flags": ["--stop-time-hours", "1"]}, "omit --stop-time-hours: a depth that it ended would count as done"),
    ({"last": "--stop-min-lr=1e-5"}, "omit --stop-min-lr: a depth that it ended would count as done"),
    ({"flags": ["--max-epoch", "20"]}, "omit --max-epoch: a depth that it ended would count as done"),
    ({"order": "blocks"}, "ORDER must be interleave or block, not 'blocks'"),
])  # fmt: skip
def test_bad_input_is_one_line(settings, problem, tools, tmp_path):
    done = grow(tmp_path, tmp_path / "out", **settings)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"grow.sh: {problem}\n")
    assert not (tmp_path / "out").exists()
