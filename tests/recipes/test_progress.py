"""The engine that runs commands and the queue of runs: status, output and progress; nothing outlives them.

A run that fails does not stop the others, and a finished one is complete.
"""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_deep.recipes import display, engine, record, trainings, watch
from tests.helpers.processes import until


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


SAVING = """
trap 'sleep 0.3; echo saved > {mark}; exit 75' TERM USR1
echo $$ > {pid}
for _ in {{1..1200}}; do sleep 0.05; done
"""


INFO = "2026-11-24 16:03:39 | INFO | fairseq_cli.preprocess | "


@pytest.mark.parametrize("lines, words", [
    ([], "no output yet"),
    (["", INFO], "no output yet"),
    ([INFO + "Namespace(no_progress_bar=False, log_interval=100)"], "no output yet"),
    ([INFO + "{'_name': None}"], "no output yet"),
    ([INFO + "[en] Dictionary: 4168 types", "  "], "[en] Dictionary: 4168 types"),
    (["x" * 91], "x" * 87 + "..."),
    (["2026-11-24 16:03:39 | WARNING | fairseq | low on space"], "WARNING | fairseq | low on space"),
])  # fmt: skip
def test_a_sign_of_life_is_the_last_line_that_says_something(capsys, lines, words):
    found = watch.Watch(display=display.Display(0))
    for line in lines:
        found.read(f"{line}\n")
    found.tick()
    assert capsys.readouterr().out == f"  0 min 00 s: {words}\n"


@pytest.mark.parametrize("limits, expected", [
    ((0, 600, 0), ["10 of 600 updates", "20 of 600 updates, left 3 min 52 s", "30 of 600 updates, left 19 min 00 s"]),
    ((3, 600, 0), ["0.1 of 3 epochs", "0.2 of 3 epochs, left 1 min 52 s", "0.3 of 3 epochs, left 9 min 01 s"]),
    ((0, 600, 0.1), ["5.2 of 6 minutes", "5.8 of 6 minutes, left 0 min 14 s"]),
    ((0, 0, 0), ["10 updates", "20 updates", "30 updates"]),
])  # fmt: skip
def test_progress_is_to_the_nearest_limit_with_the_time_left(limits, expected, tmp_path, monkeypatch, capsys):
    """A line that says nothing new is omitted; minutes are those of all sessions."""
    logged = {"kind": "session", "session": 100, "time": 410}
    (tmp_path / "train.jsonl").write_text(json.dumps(logged) + "\n")
    now = [1000.0]
    monkeypatch.setattr(watch.time, "time", lambda: now[0])
    train = watch.Train(str(tmp_path), limits, display.Display(0))
    for index, second in enumerate((0, 4, 40), 1):
        now[0] = 1000.0 + second
        train.show({"epoch": 1, "update": index / 10, "num_updates": 10 * index, "loss": "9", "ppl": "5"})
    train.finish(True)
    found = [line.split("train: ")[1].split(", epoch 1 loss 9 ppl 5") for line in capsys.readouterr().out.splitlines()]
    assert [*map("".join, found)] == expected


def end_of(body, folder, watcher=None):
    """How the shell command *body* has ended for the engine: what that has raised, if anything."""
    with engine.Engine() as running:
        try:
            asyncio.run(running.run(["bash", "-c", body], str(folder / "log"), watcher or watch.Watch()))
        except (engine.Stopped, engine.Failed, OSError) as end:
            return end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_are_handed_on_and_the_end_is_awaited(number, tmp_path):
    mark, pid = tmp_path / "mark", tmp_path / "pid"
    body = SAVING.format(mark=mark, pid=pid).replace("for _", f"kill -{int(number)} $PPID\nfor _")
    assert isinstance(end_of(body, tmp_path), engine.Stopped) and mark.read_text() == "saved\n"


@pytest.mark.parametrize("body, end", [
    ("exit 0", type(None)), ("exit 3", engine.Failed), ("exit 2", engine.Failed), ("kill -KILL $$", engine.Failed),
    ("exit 75", engine.Stopped), ("kill -TERM $$", engine.Stopped), ("kill -USR1 $$", engine.Stopped),
])  # fmt: skip
def test_status(body, end, tmp_path):
    assert isinstance(end_of(body, tmp_path), end)


def test_a_signal_that_comes_while_the_command_starts_is_handed_on(tmp_path, monkeypatch):
    """On a loaded machine, a command may have begun before the engine goes on."""
    mark, pid, popen = tmp_path / "mark", tmp_path / "pid", subprocess.Popen
    before = [signal.getsignal(each) for each in engine.SIGNALS]

    def slow(command, **options):
        child = popen(command, **options)
        until(lambda: pid.exists() and pid.read_text())
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(engine.subprocess, "Popen", slow)
    body = SAVING.format(mark=mark, pid=pid)
    assert isinstance(end_of(body, tmp_path), engine.Stopped) and mark.read_text() == "saved\n"
    assert [signal.getsignal(each) for each in engine.SIGNALS] == before


def test_a_signal_between_commands_interrupts():
    with pytest.raises(KeyboardInterrupt), engine.Engine():
        os.kill(os.getpid(), signal.SIGUSR1)


def test_output_arrives_as_lines_of_text(tmp_path):
    class Lines(watch.Watch):
        def read(self, line):
            found.append(line)

    found, body = [], r"printf 'a\r\nb\rc\xff\xc3'; sleep 0.2; printf '\xa4d\n%0100000d\ne' 7"
    assert end_of(body, tmp_path, Lines()) is None
    assert found == ["a\r\n", "b\rc\ufffdäd\n", f"{7:0100000d}\n", "e"]
    assert (tmp_path / "log").read_bytes().decode() == "".join(found)


def test_a_log_that_cannot_be_written_stops_the_command(tmp_path, monkeypatch):
    def full(line):
        raise OSError(28, "No space left on device")

    mark, pid, found = tmp_path / "mark", tmp_path / "pid", watch.Watch()
    found.read = full
    body = SAVING.format(mark=mark, pid=pid).replace("for", "echo x\nfor")
    assert "No space" in str(end_of(body, tmp_path, found))
    assert mark.read_text() == "saved\n"


def test_a_training_that_goes_on_at_another_commit_says_both(tmp_path):
    session = {"kind": "session", "time": 5, "session": 1}
    lines = [json.dumps({**session, "commit": commit}) for commit in ("1234567", "1234567", "89abcde")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    assert record.training_facts(str(tmp_path))["commit"] == "1234567, 89abcde"


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
        end_of(body, tmp_path, watcher)
        return sys.stdout.getvalue()

    return shown


def last_line(said):
    """What the last line of the terminal shows."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.rstrip().rpartition("\x1b[2K")[2])


def test_a_bar_on_a_terminal_ends_as_it_is(shown, tmp_path):
    said = shown(TRAINING)
    assert re.fullmatch(r" +train +━+ +4 updates +epoch 1 loss 9 ppl \[bold\] *", last_line(said)), said
    assert said.endswith("\n") and "\x1b[?25l" not in said, "the cursor was never hidden"
    assert "\x1b[" not in (tmp_path / "log").read_text()
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


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that makes a run whose stages are a function of its runner, with a pause after each."""

    async def run_stages(runner, *_):
        for _ in runner.plan.stages(runner):
            await asyncio.sleep(0.3)

    def report(runner):
        Path(runner.plan.exp, "RESULT.json").touch()
        return {"valid_ppl": 2.0}

    def make(label, stages):
        folder = tmp_path / label
        for name in ("checkpoints", "logs"):
            (folder / name).mkdir(parents=True)
        (folder / ".done.7").write_text("key\n")
        options = SimpleNamespace(average=1, stage=0, stop_stage=7, dry_run=False)
        plan = SimpleNamespace(exp=str(folder), options=options, keys=["key"] * 8, stages=stages)
        plan.path = lambda *parts: str(folder.joinpath(*parts))
        return trainings.Run(SimpleNamespace(label=label, ours=False), 1, plan)

    monkeypatch.setattr(trainings.Runner, "run_stages", run_stages)
    monkeypatch.setattr(trainings, "report_result", report)
    monkeypatch.setattr(trainings, "link_text", lambda *_: None)
    return make


def work(*runs, jobs=1):
    """Names of the failed runs of a queue."""
    with engine.Engine() as running:
        queue = trainings.Trainings(running, runs, SimpleNamespace(jobs=jobs, ngpu=0), "")
        return [run.name for run in asyncio.run(queue.work())]


def test_a_full_disk_fails_one_run_and_not_the_queue(make, tmp_path):
    """The log of the first run cannot be written; the second one finishes."""
    runs = [make(name, lambda runner: [runner.say("epoch")]) for name in "ab"]
    (tmp_path / "a/recipe.log").symlink_to("/dev/full")
    assert work(*runs) == ["a seed 1"]
    assert "No space left on device" in runs[0].reason() and runs[1].is_done()


def test_gpus_are_shared_where_there_are_fewer_than_trainings(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = trainings.devices_of
    assert devices(3, 1, 2) == ["0", "1", "0"] and devices(2, 2, 4) == ["0,1", "2,3"] and devices(2, 0, 0) == ["", ""]


def test_several_trainings_have_a_bar_each_and_one_for_all(make, monkeypatch):
    def train(runner):
        for update in range(1, 5):
            yield runner.display().show("train", update, 4, "updates")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert work(make("one", train), make("two", train), jobs=2) == []
    said = sys.stdout.getvalue()
    for name in ("one seed 1", "two seed 1"):
        assert f"{name}: started\n" in said and f"{name}: done in " in said
        assert re.search(rf"{name} .*[257][05] of 100 % +[123] of 4 updates", said)
    assert re.search(" all .*━.* 2 of 2 runs all done *\n$", said)
    assert "\x1b[?25l" not in said, "the cursor was never hidden"
