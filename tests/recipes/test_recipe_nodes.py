"""What machines have to do with each other in a recipe: who ended it, what is awaited, what is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types

import pytest

from fairseq_deep.recipes import nodes as nodes_of_recipes
from tests.helpers.paths import PROGRAMS

SUMMARY = """
fairseq_deep: --lr 5 is too much
E1123 01:22:24.113000 24249 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  host      : localhost
  rank      : 2 (local_rank: 0)
  exitcode  : {other} (pid: 24277)
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  exitcode  : {root} (pid: 24278)  (SIGKILL)
============================================================
"""


@pytest.fixture
def nodes():
    return nodes_of_recipes


@pytest.fixture
def told(nodes):
    """told(TEXT, **peers): why a training has failed whose torchrun printed TEXT."""

    def problem(text, peers=()):
        launch = nodes.Launch(dict(peers))
        for line in text.splitlines(keepends=True):
            launch.read(line)
        return launch.problem(75)

    return problem


@pytest.mark.parametrize("root, other, said", [
    (1, 1, "fairseq_deep: --lr 5 is too much"), (-11, 1, "process 3 on HOST was ended by SIGSEGV"),
    (-9, -15, "process 3 on HOST was ended by SIGKILL (out of memory?)"), (75, 75, ""), (75, -15, ""),
    (1, -9, "process 2 on HOST was ended by SIGKILL (out of memory?)"),
])  # fmt: skip
def test_what_torchrun_says_is_one_line(told, root, other, said):
    assert told(SUMMARY.format(root=root, other=other)) == said.replace("HOST", os.uname().nodename)


def test_a_line_of_an_older_torchrun(told):
    log = "ValueError: no\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1)\nx\n"
    assert told(log) == "ValueError: no"


def test_the_reason_of_another_machine_is_told_where_it_is_new(nodes, told, tmp_path):
    logs = [tmp_path / f"node{n}.failed" for n in range(3)]
    logs[2].write_text("of an earlier start\n")
    peers = nodes.look(str(tmp_path), 3, 0)
    assert nodes.failed(peers) == "" and list(peers) == [str(path) for path in logs[1:]]
    logs[1].write_text("process 5 is gone\n")
    assert nodes.failed(peers) == "machine 1: process 5 is gone"
    lost = SUMMARY.format(root=1, other=1).replace("--lr 5 is too much", "process 0 on a lost another process (x)")
    assert told(lost, peers) == "machine 1: process 5 is gone"
    assert told(SUMMARY.format(root=-6, other=-6), peers) == "machine 1: process 5 is gone", "NCCL aborts"
    assert told(SUMMARY.format(root=1, other=1), peers) == "fairseq_deep: --lr 5 is too much", "its own comes first"


def test_what_is_stuck_when_another_machine_has_failed_is_killed(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "GRACE", 0.2)
    child = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 60 & wait"])
    end = time.time() + 20
    while not nodes.children(child.pid) and time.time() < end:
        time.sleep(0.02)
    launch = nodes.Launch(nodes.look(str(tmp_path), 2, 0))
    launch.tick(child)
    assert launch.since is None and child.poll() is None and nodes.children(child.pid)
    (tmp_path / "node1.failed").write_text("gone\n")
    while child.poll() is None and time.time() < end:
        launch.tick(child)
        time.sleep(0.02)
    assert child.wait(20) in (0, 137) and launch.problem(75) == "machine 1: gone"


def test_a_signal_goes_to_the_processes_and_not_to_torchrun(nodes, tmp_path):
    trap = f"trap 'echo told >{tmp_path}/told; exit 75' USR1; touch {tmp_path}/ready"
    child = subprocess.Popen(["bash", "-c", f"({trap}; while :; do sleep 0.05; done) & wait $!"])
    end = time.time() + 20
    while not (tmp_path / "ready").exists() and time.time() < end:
        time.sleep(0.02)
    nodes.Launch({}).send(child, signal.SIGUSR1)
    assert child.wait(20) == 75 and (tmp_path / "told").exists()


def call(*words):
    command = [sys.executable, PROGRAMS, "nodes", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)


@pytest.fixture
def port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        opened.listen()
        yield opened.getsockname()[1]


def waiting(tmp_path, port, key="7", hours="1", host="127.0.0.1", **peers):
    words = ("--marker", tmp_path / ".done.3", "--key", key, "--done", tmp_path / ".done.4", "--done-key", "9")
    return call("wait", "--host", host, "--port", port, "--hours", hours, "--peers", json.dumps(peers), *words)


def test_waiting(tmp_path, port):
    (tmp_path / ".done.3").write_text("7\n")
    assert waiting(tmp_path, port).returncode == 0
    free = call("port", "--port", port)
    assert free.returncode == 65 and f"port {port} is in use on " in free.stderr and "--master HOST:PORT" in free.stderr
    late = waiting(tmp_path, 1, hours="0")
    assert late.returncode == 1 and "machine 0 did not start training within 0 hours (--wait-hours)" in late.stderr
    name = waiting(tmp_path, port, host="no.such.host.invalid")
    assert name.returncode == 1 and "unknown host name" in name.stderr and "Traceback" not in name.stderr
    (tmp_path / "node0.failed").write_text("stage 2 (text) refused its input\n")
    ended = waiting(tmp_path, 1, **{str(tmp_path / "node0.failed"): ""})
    assert ended.returncode == 1 and ended.stderr == "machine 0: stage 2 (text) refused its input\n"
    (tmp_path / ".done.4").write_text("9\n")
    assert waiting(tmp_path, 1).returncode == 0, "it is done already"


def test_a_folder_that_is_not_shared(nodes, tmp_path, port, monkeypatch):
    monkeypatch.setattr(nodes, "FRESH", 0)
    place = types.SimpleNamespace(host="127.0.0.1", port=port)
    with pytest.raises(nodes.Failed, match=f"{tmp_path} on this machine lacks the data.*copy {tmp_path}"):
        nodes.wait(place, "1", {}, (str(tmp_path / ".done.3"), "7"), None)
