"""SLURM: job arrays of ``compare``, the batch script, the machines of a step; on a real cluster by tests/slurm.sh."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed.utils import infer_init_method
from omegaconf import OmegaConf

from fairseq_deep import cli
from fairseq_deep.recipes import cluster
from tests.helpers.paths import ROOT
from tests.helpers.processes import until
from tests.helpers.recipes import MAIN, assert_refused, checked, write_program

SCRIPT = ROOT / "examples/slurm/job.sbatch"
TINY = "--encoder-layers 1 --decoder-layers 1 --dropout 0"
SYSTEMS = (f"plain=prenorm_6l {TINY}", f"dlcl=dlcl_6l {TINY}")
real = pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="requires a SLURM cluster: tests/slurm.sh")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Commands of this environment, on the CPU."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    for name, value in {"PATH": path, "FAIRSEQ_DEEP_ENV": "current", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)


RECIPE = "--conf mini --arch transformer_dlcl_2l2l_tiny --bpe-merges 60 --workers 1 --ngpu 0 --force-batch --disk-gb 1"
MODEL = f"--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 1 --num-workers 0 {TINY}"


def words(corpus, exp, *more, updates=60, slurm=True):
    launcher = ["--launcher", "slurm"] if slurm else []
    fixed = ["--data", corpus, "--exp", exp, "--ngpu", "0", "--workers", "1", "--width", "16", "--updates", updates,
             "--translate", "false", *launcher, *more, "--", "--num-workers", "0"]  # fmt: skip
    return [str(word) for word in fixed]


def compare(*given, **how):
    """The ended command."""
    command = [ROOT / "examples/compare/run.sh", *words(*given, **how)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def losses(exp):
    """Best validation losses by system and seed."""
    table = json.loads((exp / "table.json").read_text())
    return {row["system"]: {seed: each["valid_loss"] for seed, each in row["seeds"].items()}
            for row in table["systems"]}  # fmt: skip


def updates_of(run):
    path = run / "logs/4-train.log"
    return [int(each) for each in re.findall(r'"num_updates": "(\d+)"', path.read_text())] if path.exists() else []


@real
def test_an_array_ends_in_the_table_of_this_machine_also_after_ctrl_c_and_scancel(corpus, tmp_path):
    """Two systems with three seeds; one run is cancelled while it trains, and resumes with the next command."""
    given = ("--seeds", "3", *SYSTEMS)

    def start():
        command = [ROOT / "examples/compare/run.sh", *words(corpus, tmp_path / "exp", *given, updates=400)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    runs, child = tmp_path / "exp/runs", start()
    until((runs / "dlcl/seed3/job.json").exists)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=900)
    jobs = "the jobs continue (scancel ends them)"
    said = f"fairseq-deep compare: stopped; {jobs}; to resume: run the same command again\n"
    assert (child.returncode, err) == (130, said)
    run, child = runs / "dlcl/seed1", start()
    job = json.loads((run / "job.json").read_text())["job"]
    assert f"dlcl seed 1: job {job} is in the queue\n" in child.stdout
    until(lambda: updates_of(run))
    subprocess.run(["scancel", job], check=True)
    out, err = child.communicate(timeout=900)
    said = "fairseq-deep compare: 1 of 6 runs failed: dlcl seed 1; the same command retries them\n"
    assert (child.returncode, err) == (3, said)
    assert f"dlcl seed 1: FAILED: job {job} was cancelled or killed: see {tmp_path}/exp/slurm/{job}_0_log.err" in out
    assert out.count(": done\n") == 5 and (run / "checkpoints/checkpoint_last.pt").exists()
    done = compare(corpus, tmp_path / "exp", *given, updates=400)
    assert done.returncode == 0 and "1 of 6 runs left" in done.stdout, done.stderr
    assert "Loaded checkpoint" in (run / "logs/4-train.log").read_text()
    alone = compare(corpus, tmp_path / "alone", *given, updates=400, slurm=False)
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "exp") == losses(tmp_path / "alone")
    assert sorted(losses(tmp_path / "exp")["plain"]) == ["1", "2", "3"]


@real
def test_the_seeds_of_a_recipe_are_an_array(corpus, tmp_path):
    """With the scores of the same seeds on this machine."""
    found = []
    for exp, more in (("exp", ["--launcher", "slurm"]), ("alone", ["--jobs", "2"])):
        given = [*RECIPE.split(), "--seeds", "2", *more, "--", *MODEL.split(), "--max-update", "20"]
        command = [str(word) for word in (MAIN, "--data", corpus, "--exp", tmp_path / exp, *given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.count(": submitted as job ") == (2 if exp == "exp" else 0)
        result = json.loads((tmp_path / exp / "RESULT.json").read_text())
        found.append([result["runs"][seed]["valid_ppl"] for seed in "12"])
    assert found[0] == found[1]


@real
def test_a_run_resumes_after_its_time_limit(corpus, tmp_path, monkeypatch, capsys):
    """The loss is that of a run without a limit."""
    limit = int(os.environ.get("LIMIT_MINUTES", "1")) / 60  # a job of a loaded machine takes long to start
    monkeypatch.setattr(cluster, "SIGNAL_SECONDS", 20)
    for exp, more in (("exp", ["--slurm-hours", f"{limit:.4f}"]), ("alone", [])):
        given = words(corpus, tmp_path / exp, *more, SYSTEMS[0], updates=2500)
        assert cli.main(["compare", *given]) == 0, capsys.readouterr().err
    log = (tmp_path / "exp/runs/plain/seed1/logs/4-train.log").read_text()
    assert "stopped by a signal: saved checkpoint_last.pt" in log and "Loaded checkpoint" in log
    assert losses(tmp_path / "exp") == losses(tmp_path / "alone")


@real
def test_what_slurm_rejects_is_one_line_and_nothing_is_prepared(corpus, tmp_path):
    rejected = {"partition=none": "invalid partition specified: none", "cpus-per-task=999": "configuration"}
    for slurm, said in rejected.items():
        done = compare(corpus, tmp_path / "exp", "--slurm", slurm, SYSTEMS[0])
        done.args[0] = "compare"  # the name in its message
        assert_refused(done, "--launcher slurm: ", said, "correct --slurm")
    assert not (tmp_path / "exp").exists()


@real
def test_a_directory_that_the_nodes_do_not_have_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "FRESH", 0)
    plan = SimpleNamespace(exp=str(tmp_path / "a"), keys=["key"] * 8, options=SimpleNamespace(stop_stage=7))
    run = cluster.Run(SimpleNamespace(label="a"), 1, plan)
    (tmp_path / "a").mkdir()
    asyncio.run(cluster.Cluster(None, [run], SimpleNamespace(exp=str(tmp_path)), "")._report(run, "99"))
    assert re.match(r"job 99 ended before it began: put --exp on a disk that all nodes share \(.*_log", run.reason())


@real
def test_a_recipe_as_a_job_resumes_after_a_signal(corpus, tmp_path):
    """The signal before the time limit: the recipe saves, its job is requeued, and resumes."""
    given = f"--max-tokens 100 --batch-tokens 100 --stop-stage 4 -- {MODEL} --max-update 500 --log-interval 1"
    command = ["sbatch", "--parsable", f"--output={tmp_path}/log", SCRIPT, MAIN, "--exp", tmp_path / "exp",
               "--data", corpus, *RECIPE.split(), *given.split()]  # fmt: skip
    job = subprocess.check_output([str(word) for word in command], text=True).strip()
    until(lambda: updates_of(tmp_path / "exp"))
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    until(lambda: (tmp_path / "exp/.done.4").exists())
    log = (tmp_path / "log").read_text()
    assert "stopped in stage 4 (train); to resume: " in log and log.count("stage 3 binarise: already done") == 1
    assert max(updates_of(tmp_path / "exp")) == 500


def test_a_machine_without_slurm_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    own = ["--data", corpus, "--exp", tmp_path / "exp", "--launcher", "slurm", "lstm_6l"]
    for more, said in ((["--ngpu", "0"], "sbatch is not in PATH: run this on a login node"), ([], "requires --ngpu")):
        assert_refused(checked(ROOT / "examples/compare/run.sh", *own, *more), said)


@pytest.fixture
def step(tmp_path, monkeypatch):
    """step(NAME=value, ...): have these variables of SLURM, and two machines."""
    write_program(tmp_path / "scontrol", "printf 'n7\\nn8\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def step(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return step


def test_a_step_knows_its_machines(step):
    """SLURM's variables take the place of --nnodes, --node-rank and --master."""
    step(STEP_NUM_NODES="2", STEP_NUM_TASKS="2", NODEID="1", JOB_ID="41", STEP_NODELIST="n[7-8]")
    given = ("--dry-run", "--ngpu", "8", "--stage", "4", "--stop-stage", "4")
    done = checked(MAIN, *given)
    assert done.returncode == 0, done.stderr
    torchrun = "torchrun --nnodes 2 --node_rank 1 --master_addr n7 --master_port 20041 .*timeout=86400"
    assert re.search(torchrun, done.stdout)
    step(STEP_NUM_TASKS="16")
    assert_refused(checked(MAIN, *given), "16 tasks on 2 machines: give srun --ntasks-per-node 1")


@pytest.mark.parametrize("nodes, place", [("1", None), ("2", "tcp://n7:20007")])
def test_a_task_without_gpus_trains_on_its_cpu(step, monkeypatch, nodes, place):
    """With a count of processes of 0, fairseq starts none and ends with status 0."""
    step(STEP_NODELIST="n7", NNODES=nodes, NTASKS=nodes, NODEID="0", GPUS_ON_NODE="8")
    training = OmegaConf.structured(FairseqConfig()).distributed_training
    training.distributed_port, training.distributed_world_size = 20007, 1
    with pytest.raises(SystemExit, match="SLURM_GPUS_ON_NODE 8: torch sees 0 GPUs"):
        infer_init_method(training)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    training.distributed_init_method = None
    infer_init_method(training)
    assert training.distributed_world_size == int(nodes) and training.distributed_init_method == place
    assert training.distributed_no_spawn and training.distributed_rank == 0
