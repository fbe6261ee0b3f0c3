"""The engine that runs a recipe's commands: their status, their output, and that nothing outlives it."""

import asyncio
import json
import os
import signal
import subprocess
import time

import pytest

from fairseq_deep.recipes import engine, record, watch
from fairseq_deep.recipes.display import Display

SAVING = """
trap 'sleep 0.3; echo saved > {mark}; exit 75' TERM USR1
echo $$ > {pid}
for _ in {{1..1200}}; do sleep 0.05; done
"""


def wait_for(path, seconds=30):
    end = time.time() + seconds
    while not (path.exists() and path.read_text().endswith("\n")) and time.time() < end:
        time.sleep(0.02)
    return path.read_text()


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
    found = watch.Watch(display=Display(0))
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
    train = watch.Train(str(tmp_path), limits, Display(0))
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
        wait_for(pid)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(engine.subprocess, "Popen", slow)
    body = SAVING.format(mark=mark, pid=pid)
    assert isinstance(end_of(body, tmp_path), engine.Stopped) and mark.read_text() == "saved\n"
    assert [signal.getsignal(each) for each in engine.SIGNALS] == before


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
