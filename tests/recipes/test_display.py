"""Progress of the recipes: bars on a terminal, lines elsewhere, and a terminal that is in order after any end."""

import asyncio
import contextlib
import io
import json
import re
import sys

import pytest

from fairseq_deep.recipes import display, engine, watch
from tests.helpers.recipes import Terminal

ESCAPE = "\x1b["
STATS = '| INFO | train_inner | {"epoch": 1, "update": 0.5, "num_updates": "%s", "loss": "9", "ppl": "[bold]"}'
TRAINING = "; ".join(f"echo '{STATS % update}'" for update in range(1, 5))


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """A function that returns what is printed while a command runs."""

    def shown(body, train=True, stream=Terminal, term="xterm"):
        for name, value in {"TERM": term, "COLUMNS": "100", "FORCE_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", stream())
        monkeypatch.setattr(display, "DRAW", 0)
        watcher = watch.Train(str(tmp_path), (0, 0, 0)) if train else watch.Watch()
        with engine.Engine() as running, contextlib.suppress(engine.Stopped):
            asyncio.run(running.run(["bash", "-c", body], str(tmp_path / "log"), watcher))
        return sys.stdout.getvalue()

    return shown


def last_line(said):
    """What the last line of the terminal shows."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.rstrip().rpartition("\x1b[2K")[2])


def test_a_bar_on_a_terminal_ends_as_it_is(shown, tmp_path):
    said = shown(TRAINING)
    assert re.fullmatch(r" +train +━+ +4 updates +epoch 1 loss 9 ppl \[bold\] *", last_line(said)), said
    assert said.endswith("\n") and "\x1b[?25l" not in said, "the cursor was never hidden"
    assert ESCAPE not in (tmp_path / "log").read_text()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert kinds == ["session", *["train_inner"] * 4]


def test_ctrl_c_leaves_the_bar_and_the_terminal(shown):
    said = shown(f"echo '{STATS % 1}'; sleep 0.1; kill -INT $PPID; sleep 9")
    assert said.endswith("\n") and "1 updates" in last_line(said) and "\x1b[?25l" not in said


@pytest.mark.parametrize("stream, term, rich", [
    (Terminal, "dumb", True), (Terminal, "", True), (io.StringIO, "xterm", True), (Terminal, "xterm", False),
])  # fmt: skip
def test_lines_where_the_cursor_cannot_move(shown, stream, term, rich, monkeypatch):
    monkeypatch.setattr(display, "RICH", rich)
    assert shown(TRAINING, stream=stream, term=term) == "  train: 1 updates, epoch 1 loss 9 ppl [bold]\n"


def test_what_a_command_says_does_not_move_the_bar(shown):
    said = shown(r"printf 'a\033[5Ab\n'; sleep 1.2", train=False)
    assert "[5Ab" in last_line(said) and "\x1b[5A" not in said and last_line(said).split()[0] == "bash"
