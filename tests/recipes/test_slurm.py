"""The batch scripts for SLURM, with programs in the place of srun and scontrol: ours, and that of a recipe."""

import os
import re
import signal
import subprocess
import time

import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed.utils import infer_init_method
from omegaconf import OmegaConf

from tests.helpers.paths import ROOT

SCRIPT = ROOT / "examples/slurm/train.sbatch"
# a training that saves at a signal, or ends by itself
SRUN = """#!/usr/bin/env bash
trap 'exit ${STOPPED:-75}' USR1 TERM
echo "$@" > "$FOLDER/words"
for _ in {1..100}; do [[ -e $FOLDER/end ]] && exit "$(<"$FOLDER/end")"; sleep 0.05; done
"""


def begin(tmp_path, command, **variables):
    """A job, and the folder of its programs, when srun is at work."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/usr/bin/env bash\necho "$@" > "$FOLDER/requeued"\n'),
                       ("fairseq-deep", "#!/usr/bin/env bash\necho PLUGIN\n")):  # fmt: skip
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    child = subprocess.Popen(command, env={**environment, "SLURM_JOB_ID": "20007", **variables})
    deadline = time.time() + 20
    while not ((tmp_path / "words").exists() and (tmp_path / "words").read_text()) and time.time() < deadline:
        time.sleep(0.02)
    return child, tmp_path


@pytest.fixture
def job(tmp_path):
    child, folder = begin(tmp_path, [SCRIPT, "data", "--arch", "x"])
    yield child, folder
    child.kill()


def recipe(*words, **variables):
    command = [ROOT / "run_wmt16_ende.sh", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **variables})  # fmt: skip


class TestRecipe:
    """The script that a recipe writes with --sbatch."""

    @pytest.fixture
    def script(self, tmp_path):
        path = tmp_path / "job.sbatch"
        words = ("--exp", tmp_path / "exp of mine", "--nnodes", "2", "--ngpu", "8", "--sbatch", path)
        tried = recipe(*words, "--dry-run")
        assert tried.stdout.splitlines()[-1] == f"would write {path}" and not path.exists(), tried.stderr
        done = recipe(*words, "--", "--tensorboard-logdir", "a b")
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"wrote {path}: sbatch {path}", done.stderr
        assert "16 GPUs x 4,096 tokens x update-freq 1 = 65,536" in done.stdout
        assert not (tmp_path / "exp of mine").exists()
        return path

    def test_its_job_goes_on_after_the_time_limit(self, script, tmp_path):
        child, folder = begin(tmp_path, ["bash", script], STOPPED="130")
        child.send_signal(signal.SIGUSR1)
        assert child.wait(20) == 130 and (folder / "requeued").read_text() == "requeue 20007\n"
        words = (folder / "words").read_text().strip()
        given = f"{ROOT}/run_wmt16_ende.sh --exp {tmp_path}/exp of mine --ngpu 8 -- --tensorboard-logdir a b"
        assert words == f"--cpus-per-task=1 {given}"
        text = script.read_text()
        for flag in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=32", "requeue",
                     "signal=B:USR1@300"):  # fmt: skip
            assert f"#SBATCH --{flag}\n" in text
        prepared = re.search(r"^#   (.*--stop-stage 3)( .*)$", text, re.MULTILINE)
        assert subprocess.run(["bash", "-c", f"{prepared[1]} --dry-run{prepared[2]}"]).returncode == 0

    @pytest.mark.parametrize("processes, cores", [("1", "5"), ("7", "7")])
    def test_without_a_gpu(self, tmp_path, processes, cores):
        """The cores are those of the text's processes, or of training."""
        words = ["--ngpu", "0", "--workers", "5", "--cpu-processes", processes, "--force-batch", "--stage", "4"]
        done = recipe("--sbatch", tmp_path / "a", *words)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "a").read_text()
        assert f"--cpus-per-task={cores}\n" in text and "gpus" not in text
        assert re.search(r"^#   .* --stop-stage 3$", text, re.MULTILINE) and text.count("--stage 4") == 1

    @pytest.mark.parametrize("status", ["1", "130"])
    def test_an_end_of_another_kind_is_no_reason(self, script, tmp_path, status):
        child, folder = begin(tmp_path, ["bash", script])
        (folder / "end").write_text(status)
        assert child.wait(20) == int(status) and not (folder / "requeued").exists()

    def test_a_task_of_it_knows_its_machines(self, tmp_path):
        """What SLURM says is what --nnodes, --node-rank and --master say elsewhere."""
        (tmp_path / "scontrol").write_text('#!/usr/bin/env bash\necho "$@" >&2\nprintf "n7\\nn8\\n"\n')
        (tmp_path / "scontrol").chmod(0o755)
        step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "41",
                "SLURM_STEP_NODELIST": "n[7-8]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
        words = ("--dry-run", "--ngpu", "8", "--stage", "4", "--stop-stage", "4")
        done = recipe(*words, **step)
        assert done.returncode == 0, done.stderr
        assert "torchrun --nnodes 2 --node_rank 1 --master_addr n7 --master_port 20041 --nproc" in done.stdout
        done = recipe(*words, **{**step, "SLURM_STEP_NUM_TASKS": "16"})
        assert done.returncode == 2 and "16 tasks on 2 machines: give srun --ntasks-per-node 1" in done.stderr


def test_the_time_is_over(job):
    child, folder = job
    child.send_signal(signal.SIGUSR1)
    assert child.wait(20) == 75 and (folder / "requeued").read_text() == "requeue 20007\n"
    words = (folder / "words").read_text().split()[1:]
    assert words == ["fairseq-train", "data", "--arch", "x", "--user-dir", "PLUGIN", "--distributed-port", "20007"]


@pytest.mark.parametrize("status", [0, 1, 75])
def test_an_end_of_another_kind_is_no_reason_to_go_on(job, status):
    child, folder = job
    (folder / "end").write_text(str(status))
    assert child.wait(20) == status and not (folder / "requeued").exists()


def test_the_flags_that_it_needs_are_there():
    text = SCRIPT.read_text()
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@" in text and "--open-mode=append" in text
    assert "#SBATCH --cpus-per-task=" in text


@pytest.mark.parametrize("nodes, place", [("1", None), ("2", "tcp://n7:20007")])
def test_a_task_without_gpus_trains_on_its_cpu(tmp_path, monkeypatch, nodes, place):
    """With a count of processes of 0, fairseq starts none and ends with status 0."""
    (tmp_path / "scontrol").write_text("#!/usr/bin/env bash\necho n7\n")
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_STEP_NODELIST": "n7", "SLURM_NNODES": nodes,
                        "SLURM_NTASKS": nodes, "SLURM_NODEID": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    training = OmegaConf.structured(FairseqConfig()).distributed_training
    training.distributed_port, training.distributed_world_size = 20007, 1
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(SystemExit, match="SLURM_GPUS_ON_NODE 8: torch sees 0 GPUs"):
        infer_init_method(training)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    training.distributed_init_method = None
    infer_init_method(training)
    assert training.distributed_world_size == int(nodes) and training.distributed_init_method == place
    assert training.distributed_no_spawn and training.distributed_rank == 0
