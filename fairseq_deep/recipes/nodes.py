"""Training on several machines, which run the same command with different ranks.

The first machine runs all stages. The others only train: they start torchrun at once, which connects to the first one
when it begins to train.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError

from .engine import STOPPED

if TYPE_CHECKING:
    from .recipe import Recipe

GRACE = 300
"""Seconds for the training processes to save and end by themselves after another process has ended."""

PROCESS = re.compile(r"^\s+rank\s*: (\d+).*\n\s+exitcode\s*: (-?\d+)", re.MULTILINE)
AGENT = re.compile(r"torch[./]distributed[./]elastic")
ENDING = re.compile(rf"^.*{AGENT.pattern}.*(closing signal|failed \(exitcode).*$", re.MULTILINE)
"""A process that failed, and lines of torchrun: any, and the first after a process has ended."""


class Place:
    """Rank of this machine, number of machines, and address of the first one.

    Args:
        options: options of the recipe; "auto" is resolved with SLURM's variables

    Raises:
        UsageError: options conflict or are missing
    """

    def __init__(self, options: Recipe) -> None:
        steps = int(os.environ.get("SLURM_STEP_NUM_NODES") or 1)
        self.host, self.port = "", 0
        self.nnodes = steps if options.nnodes == "auto" else options.nnodes
        rank = options.node_rank
        if self.nnodes == 1:
            if rank not in ("auto", 0) or options.master:
                raise UsageError("--node-rank and --master require several machines: add --nnodes")
            self.rank = 0
            return
        if options.seeds:
            raise UsageError(
                "--seeds and --nnodes exclude each other: train each seed separately, with --seed and --exp"
            )
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or str(steps)
        if steps > 1 and tasks != str(steps):
            raise UsageError(f"srun has started {tasks} tasks on {steps} machines: give srun --ntasks-per-node 1")
        if rank == "auto" and steps == self.nnodes:
            rank = int(os.environ["SLURM_NODEID"])
        if rank == "auto":
            if not options.dry_run:
                raise UsageError(
                    f"--nnodes {self.nnodes} requires --node-rank: 0 on the machine that prepares the data, "
                    f"up to {self.nnodes - 1} on the others"
                )
            rank = 0
        if rank >= self.nnodes:
            raise UsageError(f"--node-rank {rank}: with --nnodes {self.nnodes} the numbers are 0 to {self.nnodes - 1}")
        self.rank = rank
        self._resolve_master(options, steps)

    def _resolve_master(self, options: Recipe, steps: int) -> None:
        """Resolve HOST or HOST:PORT, also [::1]:29500; SLURM's default is its first machine and a port per job."""
        if not options.master and steps == self.nnodes:
            options.master = _slurm_master()
        master = options.master
        if not master:
            raise UsageError(
                f"--nnodes {self.nnodes} requires --master: the name or address of the machine with --node-rank 0"
            )
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^]:/\s[]+)(:([0-9]+))?", master)
        if not match:
            raise UsageError(f"--master must be HOST or HOST:PORT, not '{master}'")
        self.host, self.port = match[1].strip("[]"), int(match[3] or 29500)
        if not 0 < self.port < 65536:
            raise UsageError(f"--master {master}: the port must be from 1 to 65535")

    def launcher(self, rank: int, processes: int, wait_hours: str) -> list[str]:
        """Return the command that starts the *processes* of the machine *rank*, one of several."""
        limit = f"timeout={max(1, round(3600 * float(wait_hours)))}"
        return ["torchrun", "--nnodes", str(self.nnodes), "--node_rank", str(rank), "--master_addr", self.host,
                "--master_port", str(self.port), "--rdzv_conf", limit, "--nproc_per_node", str(processes),
                "--no_python"]  # fmt: skip


def _slurm_master() -> str:
    try:
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        hosts = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        return f"{hosts[0]}:{20000 + int(os.environ['SLURM_JOB_ID']) % 20000}"
    except (OSError, KeyError, IndexError, subprocess.CalledProcessError):
        raise UsageError("scontrol does not name the machines of this step: give --master, the first of them") from None


def explain(output: str) -> str:
    """Return why a training has ended, from the output of torchrun and its processes.

    Empty if a signal has ended it, and a checkpoint was saved.
    """
    failures = [(rank, int(status)) for rank, status in PROCESS.findall(output)]
    mild = (-signal.SIGTERM, -signal.SIGABRT)  # sent by torchrun, and by NCCL after the loss of another process
    for rank, status in failures:
        if status < 0 and status not in mild:
            hint = " (out of memory?)" if -status == signal.SIGKILL else ""
            return f"process {rank} on {platform.node()} was ended by {signal.Signals(-status).name}{hint}"
    if any(status == STOPPED for _, status in failures):
        return ""
    end = ENDING.search(output)
    lines = [line.strip() for line in output[: end and end.start()].splitlines()
             if line.strip() and not line.startswith(" ") and not AGENT.search(line)]  # fmt: skip
    return lines[-1] if lines else "no output"
