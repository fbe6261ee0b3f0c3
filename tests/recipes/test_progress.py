"""The engine that runs a recipe's commands: their status, their output, and that nothing outlives it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_deep.recipes import engine, record, watch
from fairseq_deep.recipes.display import Display
from tests.helpers.paths import PROGRAMS

SAVING = "trap 'sleep 0.3; echo saved > {mark}; exit 75' TERM USR1; echo $$ > {pid}; while :; do sleep 0.05; done"


@pytest.fixture
def progress():
    return watch


def begin(folder, body, *options):
    command = [sys.executable, PROGRAMS, "process", "--log", folder / "log", *options, "--", "bash", "-c", body]
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)


def wait_for(path, seconds=30):
    end = time.time() + seconds
    while not (path.exists() and path.read_text().endswith("\n")) and time.time() < end:
        time.sleep(0.02)
    return path.read_text()


def said(progress, kind, lines, **options):
    """What the watch *kind* prints after *lines*."""
    found = kind(display=Display(0), **options)
    for line in lines:
        found.read(line + "\n")
    return found


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
def test_a_sign_of_life_is_the_last_line_that_says_something(progress, capsys, lines, words):
    said(progress, progress.Watch, lines).tick()
    assert capsys.readouterr().out == f"  0 min 00 s: {words}\n"


def test_before_the_first_figures_it_says_what_training_does(progress, capsys, tmp_path):
    limits = {"--max-epoch": "", "--max-update": "", "--stop-time-hours": ""}
    options = {"limits": limits, "jsonl": str(tmp_path / "train.jsonl")}
    watch = said(progress, progress.Train, [INFO + "loaded 10,000 examples from: data-bin"], **options)
    watch.tick()
    watch.read("2026-11-24 16:03:43 | INFO | fairseq.trainer | begin training epoch 1\n")
    for _ in range(3):  # a log does not repeat what it has
        watch.tick()
    watch.finish(True)
    lines = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["loaded 10,000 examples from: data-bin", "first updates, no statistics yet"]


@pytest.mark.parametrize("limits, seconds, expected", [
    ((None, 600, 0.45), [0, 4, 40], [None, None, 40 / 20 * 570]),
    ((None, 600, 0.01), [0, 4, 40], [None, None, -4]),  # the time ends before
    ((None, 100, None), [0, 4, 40], [None, 4 / 10 * 80, 40 / 20 * 70]),  # a tenth is enough
    ((3, 600, None), [0, 4, 40], [None, None, 40 / 0.2 * 2.7]),
    ((None, None, 0.01), [0, 4, 40], [36, 32, -4]),
    ((None, None, None), [0, 4, 40], [None, None, None]),
])  # fmt: skip
def test_the_time_left_is_said_once_it_means_something(limits, seconds, expected, progress, tmp_path, monkeypatch):
    names = ("--max-epoch", "--max-update", "--stop-time-hours")
    given = {name: str(limit or "") for name, limit in zip(names, limits)}
    monkeypatch.setattr(progress.time, "time", lambda: 1000.0)
    watch = progress.Train(str(tmp_path / "train.jsonl"), given, Display(0))
    found = []
    for index, second in enumerate(seconds, 1):
        monkeypatch.setattr(progress.time, "time", lambda second=second: 1000.0 + second)
        stats = {"epoch": 1, "update": index / 10, "num_updates": 10 * index, "loss": "9", "ppl": "5"}
        watch.show(stats)
        found.append(watch.seconds_left(stats))
    watch.finish(True)
    assert found == [None if each is None else pytest.approx(each) for each in expected]


def test_a_time_limit_counts_earlier_sessions(progress, tmp_path, monkeypatch):
    logged = [{"kind": "session", "session": begun, "time": end} for begun, end in ((100, 130), (500, 505))]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in logged))
    monkeypatch.setattr(progress.time, "time", lambda: 1000.0)
    for hours, expected in (("0.1", 360 - 30 - 5), ("-1", None)):
        limits = {"--max-epoch": "", "--max-update": "", "--stop-time-hours": hours}
        watch = progress.Train(str(tmp_path / "train.jsonl"), limits, Display(0))
        stats = {"epoch": 1, "update": 0.1, "num_updates": 10, "loss": "9", "ppl": "5"}
        watch.show(stats)
        assert watch.seconds_left(stats) == (expected and pytest.approx(expected))
        watch.finish(True)


@pytest.mark.parametrize("body, status", [
    ("exit 0", 0), ("exit 3", 1), ("exit 2", 1), ("exit 75", 130), ("kill -TERM $$", 130), ("kill -USR1 $$", 130),
    ("kill -KILL $$", 1),
])  # fmt: skip
def test_status(body, status, tmp_path):
    assert begin(tmp_path, body).wait(30) == status


@pytest.mark.parametrize("number", engine.SIGNALS)
def test_signals_are_handed_on_and_the_end_is_awaited(number, tmp_path):
    mark, pid = tmp_path / "mark", tmp_path / "pid"
    child = begin(tmp_path, SAVING.format(mark=mark, pid=pid))
    wait_for(pid)
    child.send_signal(number)
    assert child.wait(30) == 130 and mark.read_text() == "saved\n"


def run_commands(*bodies, folder):
    """Run shell commands at the same time; return what each has raised."""

    async def run():
        commands = [running.run(["bash", "-c", body], str(folder / f"log{n}"), watch.Watch())
                    for n, body in enumerate(bodies)]  # fmt: skip
        return await asyncio.gather(*commands, return_exceptions=True)

    with engine.Engine() as running:
        return asyncio.run(run())


@pytest.mark.parametrize("number", engine.SIGNALS)
def test_signals_that_come_while_the_command_starts_are_handed_on(number, tmp_path, monkeypatch):
    """On a loaded machine, a command may have begun before the engine goes on."""
    mark, pid, popen = tmp_path / "mark", tmp_path / "pid", subprocess.Popen
    before = [signal.getsignal(each) for each in engine.SIGNALS]

    def slow(command, **options):
        child = popen(command, **options)
        wait_for(pid)
        os.kill(os.getpid(), number)
        return child

    monkeypatch.setattr(engine.subprocess, "Popen", slow)
    [found] = run_commands(SAVING.format(mark=mark, pid=pid), folder=tmp_path)
    assert isinstance(found, engine.Stopped) and mark.read_text() == "saved\n"
    assert [signal.getsignal(each) for each in engine.SIGNALS] == before


def test_commands_run_at_the_same_time_and_one_that_fails_does_not_stop_the_others(tmp_path):
    meet = "touch {0}/{1}; for i in {{1..400}}; do [[ ! -e {0}/{2} ]] || {{ echo met; exit {3}; }}; sleep 0.05; done"
    found = run_commands(meet.format(tmp_path, "a", "b", 0), meet.format(tmp_path, "b", "a", 3), folder=tmp_path)
    assert found[0] is None and isinstance(found[1], engine.Failed) and str(found[1]) == "met"


def test_output_arrives_as_lines_of_text(tmp_path):
    class Lines(watch.Watch):
        def read(self, line):
            found.append(line)

    found, body = [], r"printf 'a\r\nb\rc\xff\xc3'; sleep 0.2; printf '\xa4d\n%0100000d\ne' 7"
    with engine.Engine() as running:
        asyncio.run(running.run(["bash", "-c", body], str(tmp_path / "log"), Lines()))
    assert found == ["a\n", "b\n", "c\ufffdäd\n", f"{7:0100000d}\n", "e"]
    assert (tmp_path / "log").read_text() == "".join(found)


def test_a_log_that_cannot_be_written_stops_the_command(tmp_path, monkeypatch):
    def full(line):
        raise OSError(28, "No space left on device")

    mark, pid, found = tmp_path / "mark", tmp_path / "pid", watch.Watch()
    found.read = full
    with engine.Engine() as running, pytest.raises(OSError, match="No space"):
        body = SAVING.format(mark=mark, pid=pid).replace("while", "echo x; while")
        asyncio.run(running.run(["bash", "-c", body], str(tmp_path / "log"), found))
    assert mark.read_text() == "saved\n"


def test_a_training_that_goes_on_at_another_commit_says_both(progress, tmp_path):
    stats = '{"epoch": 1, "update": 0.5, "num_updates": "%d", "loss": "9", "ppl": "512"}'
    path, options = tmp_path / "train.jsonl", ("--train", tmp_path / "train.jsonl")
    assert begin(tmp_path, "exit 3", *options).wait(30) == 1 and path.read_text() == ""  # it has trained nothing
    for update in (1, 2):
        assert begin(tmp_path, f"echo '| INFO | train_inner | {stats % update}'", *options).wait(30) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["kind"] for each in records] == ["session", "train_inner"] * 2
    assert records[0]["commit"] == record.commit()
    records[0]["commit"] = "1234567"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert record.training_facts(str(tmp_path))["commit"] == f"1234567, {records[2]['commit']}"


def test_kill_9_leaves_nothing_running(tmp_path):
    mark, pid = tmp_path / "mark", tmp_path / "pid"
    child = begin(tmp_path, SAVING.format(mark=mark, pid=pid))
    number = int(wait_for(pid))
    child.kill()
    child.wait(30)
    assert wait_for(mark) == "saved\n", "it was told, and could save"
    end = time.time() + 10
    while Path(f"/proc/{number}").exists() and time.time() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()
