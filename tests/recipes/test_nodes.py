"""Several machines: here two "machines" of one process each, over the loopback interface, with gloo on the CPU."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fairseq import safe_nodes

from fairseq_deep.recipes import nodes
from tests.helpers.commands import losses, run, train_command
from tests.helpers.processes import live, until
from tests.helpers.recipes import MAIN

WORDS = """
--conf mini --arch transformer_dlcl_2l2l_tiny --bpe-merges 60 --workers 1 --disk-gb 1 --beam 1 --ngpu 0
--max-tokens 100 --batch-tokens 200 --stop-stage 4
""".split()
MODEL = """
-- --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-layers 2 --dropout 0 --attention-dropout 0
--activation-dropout 0 --lr 0.01 --warmup-updates 10 --num-workers 0 --log-interval 1 --max-epoch 2
""".split()


@pytest.fixture
def begin(programs, corpus, tmp_path, monkeypatch):
    """begin(): both machines of tmp_path/exp, each a recipe of its own; numbers of processes are in tmp_path/pids."""
    (programs / "torchrun").unlink()  # so it is the real one
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    def begin():
        words = [MAIN, "--exp", tmp_path / "exp", "--data", corpus, *WORDS, "--nnodes", "2", "--master",
                 f"127.0.0.1:{safe_nodes.free_port()}", "--node-rank"]  # fmt: skip
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return [subprocess.Popen([*map(str, words), str(rank), *MODEL], **how) for rank in range(2)]

    return begin


def ends(machines):
    """Of each: status, standard output, standard error."""
    said = [child.communicate(timeout=300) for child in machines]
    return [(child.returncode, *each) for child, each in zip(machines, said)]


def last(folder):
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
    return {name: value for name, value in state.items() if "_float_tensor" not in name}


def test_two_machines_train_as_one_process_and_one_that_dies_ends_both(begin, tmp_path):
    """A process is killed, the next start goes on, and losses and weights are those of one process left alone."""
    exp, log, machines = tmp_path / "exp", tmp_path / "exp/logs/4-train.log", begin()
    until(lambda: log.exists() and max(losses(log.read_text()), default=0) > 10, 600)  # which is an epoch
    os.kill(int((tmp_path / "pids/fairseq-train.1").read_text()), signal.SIGKILL)
    ended = ends(machines)
    reasons = ["process 0 on .* lost another process", r"process 1 on .* was ended by SIGKILL \(out of memory\?\)"]
    for rank, (status, out, err) in enumerate(ended):
        assert status == 1 and err.count("\n") == 1, ended
        assert re.match(f"fairseq-deep recipe: stage 4 \\(train\\) failed: {reasons[rank]}", err), ended
        assert f"resume.sh --node-rank {rank}\n" in err
        assert ("stage 3 binarise" in out) == (rank == 0)
    assert "2 CPUs x 100 tokens x update-freq 1 = 200 tokens per update" in ended[0][1]
    until(lambda: not live(*(path.read_text() for path in (tmp_path / "pids").iterdir())), 10)
    sessions = ",".join(str(child.pid) for child in machines)
    running = ["pgrep", "-s", sessions, "--runstates", "R,S,D,T"]  # not what nobody has waited for
    assert subprocess.run(running, capture_output=True, text=True).stdout == ""
    before = losses(log.read_text())
    assert not (exp / ".done.4").exists() and not (exp / "checkpoints/checkpoint2.pt").exists()

    again = ends(begin())
    assert [status for status, _, _ in again] == [0, 0] and again[0][1].count("already done") == 4, again
    assert (exp / "trained-with.txt").read_text().splitlines()[3] == "2 CPUs on 2 machines"
    found = losses(log.read_text())
    assert "Loaded checkpoint" in log.read_text() and min(set(found) - set(before)) > 10

    words = shlex.split((exp / "train.sh").read_text())
    for flag, value in (("--update-freq", "2"), ("--save-dir", str(tmp_path / "one"))):
        words[words.index(flag) + 1] = value
    done = run(*words, check=False)
    alone = losses(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(alone) >= 12 and found == pytest.approx(alone, abs=2e-3)
    weights = last(exp / "checkpoints")
    for name, value in last(tmp_path / "one").items():
        torch.testing.assert_close(weights[name], value, atol=1e-3, rtol=0, msg=name)


def start(small, folder, *flags, **place):
    """Status and last line of one process."""
    done = run(*train_command(small, folder, "--num-workers", "0", *flags), check=False, env=place)
    assert "Traceback" not in done.stdout + done.stderr and losses(done.stdout) == {}, done.stderr[-2000:]
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


GLOO = ("--distributed-backend", "gloo")


def test_processes_that_differ_do_not_begin(small, tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(safe_nodes.free_port()), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(start, small, tmp_path, *GLOO, "--dropout", f"0.{rank + 1}", **place, RANK=str(rank))
                 for rank in range(2)]  # fmt: skip
    for status, line in (each.result() for each in ended):
        assert status == 1 and re.fullmatch(
            r"process 1 on \S+ has --dropout 0.2, process 0 on \S+ 0.1: run the same command on all machines", line
        ), line
    assert not list(tmp_path.glob("*.pt"))


SAME = {"host": "a", "python": "3.11", "torch": "2.5", "fairseq": "0.12.2", "--user-dir": "with hash 1",
        "data": "with hash 2", "checkpoint_last.pt": "there", "settings": {"lr": "0.1"}}  # fmt: skip


@pytest.mark.parametrize("change, said", [
    ({}, ""),
    ({"torch": "2.6"}, "process 1 on b has torch 2.6, process 0 on a 2.5: install the same version on all"),
    ({"checkpoint_last.pt": "missing"}, "checkpoint_last.pt missing, process 0 on a there: use a --save-dir on"),
    ({"data": "with hash 3", "settings": {}}, "has data with hash 3, process 0 on a with hash 2: prepare"),
    ({"settings": {"lr": "0.1", "clip_norm": "1"}}, "has --clip-norm 1, process 0 on a nothing: run the same"),
])  # fmt: skip
def test_what_differs_is_named_with_its_cure(change, said):
    found = safe_nodes.difference([SAME, {**SAME, "host": "b", **change}])
    assert said in found and bool(found) == bool(change)


def test_sums_see_words_and_sizes_and_code(small, tmp_path):
    before = safe_nodes.sum_of_data(str(small))
    shutil.copytree(small, tmp_path / "copy")
    assert safe_nodes.sum_of_data(str(tmp_path / "copy")) == before
    data = next((tmp_path / "copy").glob("train.*.bin"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-2])
    assert safe_nodes.sum_of_data(str(tmp_path / "copy")) != before
    data.write_bytes(whole)
    words = (tmp_path / "copy/dict.src.txt").read_text().splitlines()
    (tmp_path / "copy/dict.src.txt").write_text("\n".join([words[1], words[0], *words[2:]]) + "\n")
    assert safe_nodes.sum_of_data(str(tmp_path / "copy")) != before
    (tmp_path / "code/sub").mkdir(parents=True)
    (tmp_path / "code/sub/a.py").write_text("x = 1\n")
    before = safe_nodes.sum_of_code(str(tmp_path / "code"))
    (tmp_path / "code/sub/a.py").write_text("x = 2\n")
    assert safe_nodes.sum_of_code(str(tmp_path / "code")) != before and safe_nodes.sum_of_code(None) == "none"


def test_a_port_in_use_and_gpus_that_are_not_there_are_one_line(small, tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with socket.socket() as opened:
        opened.bind(("", 0))
        opened.listen()
        port = str(opened.getsockname()[1])
        status, line = start(small, tmp_path, *GLOO, **place, MASTER_PORT=port)
        assert status == 1 and f"127.0.0.1:{port}: the port is in use on " in line and "use another port" in line
    status, line = start(small, tmp_path, "--distributed-world-size", "8")
    assert status == 1 and line.startswith("--distributed-world-size 8: torch sees 0 GPUs on "), line
    status, line = start(small, tmp_path, **place, MASTER_PORT=port)
    assert status == 1 and line == "several processes with --cpu require --distributed-backend gloo"
    assert not list(tmp_path.glob("*.pt"))


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


@pytest.mark.parametrize("root, other, said", [
    (1, 1, "fairseq_deep: --lr 5 is too much"), (-11, 1, "process 3 on HOST was ended by SIGSEGV"),
    (-9, -15, "process 3 on HOST was ended by SIGKILL (out of memory?)"), (75, 75, ""), (75, -15, ""),
    (1, -9, "process 2 on HOST was ended by SIGKILL (out of memory?)"),
    (-6, -15, "fairseq_deep: --lr 5 is too much"),  # NCCL aborts after the loss of another process
])  # fmt: skip
def test_what_torchrun_says_is_one_line(root, other, said):
    assert nodes.explain(SUMMARY.format(root=root, other=other)) == said.replace("HOST", os.uname().nodename)


def test_a_port_in_use_is_named():
    line = "torch.distributed.DistNetworkError: The server socket has failed to listen: port 29500, EADDRINUSE"
    assert nodes.explain(f"Traceback (most recent call last):\n  File x\n    store = x\n{line}\n") == line
