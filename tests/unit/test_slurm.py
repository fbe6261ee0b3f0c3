"""The batch script for SLURM, with programs in the place of srun and scontrol."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/slurm/train.sbatch"
# a training that saves at a signal, or ends by itself
SRUN = """#!/usr/bin/env bash
echo "$@" > "$FOLDER/words"
trap 'exit 75' USR1 TERM
for _ in {1..100}; do [[ -e $FOLDER/end ]] && exit "$(<"$FOLDER/end")"; sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", '#!/usr/bin/env bash\necho "$@" > "$FOLDER/requeued"\n'),
                       ("fairseq-deep", "#!/usr/bin/env bash\necho PLUGIN\n")):  # fmt: skip
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    child = subprocess.Popen([SCRIPT, "data", "--arch", "x"], env={**environment, "SLURM_JOB_ID": "20007"})
    deadline = time.time() + 20
    while not (tmp_path / "words").exists() and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    yield child, tmp_path
    child.kill()


def test_the_time_is_over(job):
    child, folder = job
    child.send_signal(signal.SIGUSR1)
    assert child.wait(20) == 75 and (folder / "requeued").read_text() == "requeue 20007\n"
    words = (folder / "words").read_text().split()
    assert words == ["fairseq-train", "data", "--arch", "x", "--user-dir", "PLUGIN", "--distributed-port", "20007"]


@pytest.mark.parametrize("status", [0, 1, 75])
def test_an_end_of_another_kind_is_no_reason_to_go_on(job, status):
    child, folder = job
    (folder / "end").write_text(str(status))
    assert child.wait(20) == status and not (folder / "requeued").exists()


def test_the_flags_that_it_needs_are_there():
    text = SCRIPT.read_text()
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@" in text and "--open-mode=append" in text
