"""The queue of training runs: a run that fails does not stop the others, and a finished one is complete."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_deep.recipes import engine, trainings
from tests.helpers import recipes


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
    monkeypatch.setattr(sys, "stdout", recipes.Terminal())
    assert work(make("one", train), make("two", train), jobs=2) == []
    said = sys.stdout.getvalue()
    for name in ("one seed 1", "two seed 1"):
        assert f"{name}: started\n" in said and f"{name}: done in " in said
        assert re.search(rf"{name} .*[257][05] of 100 % +[123] of 4 updates", said)
    assert re.search(" all .*━.* 2 of 2 runs all done *\n$", said)
    assert "\x1b[?25l" not in said, "the cursor was never hidden"
