"""Progress of the recipes: bars on a terminal, lines elsewhere, and a terminal that is in order after any end."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.paths import PROGRAMS

ESCAPE = "\x1b["
STATS = '| INFO | train_inner | {{"epoch": 1, "update": 0.5, "num_updates": "{}", "loss": "9", "ppl": "[bold]"}}'
COMPARE = """
import asyncio, os, sys
from types import SimpleNamespace as Facts
sys.modules["fairseq"] = None  # which it needs not, and which takes seconds
from fairseq_deep.recipes import engine, runner, trainings
class Run(trainings.Run):
    def prune(self): self.ended = True
    def is_done(self): return hasattr(self, "ended")
class Runner(runner.Runner):
    def __init__(self, plan, engine, out, display, environment):
        self.display = display
    async def run_stages(self, *_):
        for update in range(1, 5):
            self.display().show("train", update, 4, "updates")
            await asyncio.sleep(0.6)
trainings.Runner, trainings.report_result = Runner, lambda runner: {"valid_ppl": 5.0}
os.makedirs(sys.argv[1] + "/shared", exist_ok=True)
runs, plan = [], lambda folder: Facts(exp=folder, options=Facts(stage=0, stop_stage=7))
for label in ("one", "two"):
    folder = sys.argv[1] + "/" + label
    os.makedirs(folder, exist_ok=True)
    runs.append(Run(Facts(label=label, ours=False), 1, plan(folder)))
with engine.Engine() as running:
    asyncio.run(trainings.Trainings(running, runs, Facts(jobs=2, ngpu=0), sys.argv[1] + "/shared").work())
"""


def on_terminal(command, interrupt_at=b"", term="xterm"):
    """Exit status and output of a command on a pseudo-terminal, which gets SIGINT when it prints *interrupt_at*."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [str(word) for word in command], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": term, "COLUMNS": "100"},
    )  # fmt: skip
    os.close(slave)
    said, end = b"", time.time() + 60
    while time.time() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                block = os.read(master, 1 << 16)
            except OSError:
                break
            said += block
            if not block:
                break
        if interrupt_at and interrupt_at in said:
            os.killpg(child.pid, signal.SIGINT)
            interrupt_at = b""
    os.close(master)
    return child.wait(30), said.decode()


def command(folder, body, *options):
    return [sys.executable, PROGRAMS, "process", "--log", folder / "log", *options, "--", "bash", "-c", body]


def training(folder, seconds):
    body = f"for i in 1 2 3 4; do echo '{STATS.format('$i')}'; sleep {seconds}; done".replace("$i", "'$i'")
    return command(folder, body, "--train", folder)


def last_line(said):
    """What the last line of the terminal shows."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.rstrip().rpartition("\x1b[2K")[2])


def test_a_bar_on_a_terminal_ends_as_it_is(tmp_path):
    status, said = on_terminal(training(tmp_path, 0.4))
    assert status == 0 and "━" in said and said.endswith("\r\n")
    assert re.fullmatch(r" +train +━+ +4 updates +epoch 1 loss 9 ppl \[bold\] *\r?\n?", last_line(said)), said
    assert "\x1b[?25l" not in said, "the cursor was never hidden"
    assert ESCAPE not in (tmp_path / "log").read_text()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert kinds == ["session", *["train_inner"] * 4]


def test_ctrl_c_leaves_the_bar_and_the_terminal(tmp_path):
    status, said = on_terminal(training(tmp_path, 5), interrupt_at=b"1 updates")
    assert status == 130 and said.endswith("\r\n") and "Traceback" not in said
    assert "1 updates" in last_line(said) and "\x1b[?25l" not in said


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path, term):
    status, said = on_terminal(training(tmp_path, 0), term=term)
    assert status == 0 and ESCAPE not in said
    assert said.startswith("  train: 1 updates, epoch 1 loss 9 ppl [bold]"), said


def test_a_pipe_gets_lines(tmp_path):
    words = [str(word) for word in training(tmp_path, 0)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": "1"}, timeout=300)
    assert done.returncode == 0 and done.stdout == "  train: 1 updates, epoch 1 loss 9 ppl [bold]\n"


def test_what_a_command_says_does_not_move_the_bar(tmp_path):
    status, said = on_terminal(command(tmp_path, r"printf 'a\033[5Ab\n'; sleep 2.5"))
    assert status == 0 and "[5Ab" in last_line(said) and "\x1b[5A" not in said
    assert last_line(said).split()[0] == "bash"


def test_several_trainings_have_a_bar_each_and_one_for_all(tmp_path):
    program = [sys.executable, "-c", COMPARE, tmp_path]
    status, said = on_terminal(program)
    assert status == 0, said
    for name in ("one seed 1", "two seed 1"):
        assert f"{name}: started\r\n" in said and f"{name}: done in " in said
        assert re.search(rf"{name} .*50 of 100 % +2 of 4 updates", said)
    assert re.match(" +all +━+ +2 of 2 runs", last_line(said)), last_line(said)
    done = subprocess.run([str(word) for word in program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and ESCAPE not in done.stdout and len(done.stdout.splitlines()) == 4, done
