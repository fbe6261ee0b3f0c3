"""Training on several machines, which run the same command with different ranks.

The first machine runs all stages. The others only train, and write only their logs. A machine that fails writes one
line to ``logs/nodeN.failed``. A new line there stops the other machines, which might otherwise hang.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import signal
import socket
import subprocess
import time

from fairseq_deep.errors import UsageError

from .stages import read_marker

GRACE = 30
"""Seconds for the training processes to end by themselves after another process has ended."""
TELLING = 30
"""Time limit for another machine's error in seconds, if the local error is only the loss of another process."""
FRESH = 60
"""Seconds until a shared directory shows the files of another machine."""

FIELD = re.compile(r"^\s+(rank|exitcode)\s*: (-?\d+)")
AGENT = re.compile(r"torch[./]distributed[./]elastic")


def stamp(path):
    """Return a string that changes when the file is replaced; empty if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_mtime_ns} {found.st_size} {found.st_ino}"


class Failed(Exception):
    """A command or another machine has failed; the message is the reason, if known."""


class Place:
    """Rank of this machine, number of machines, and address of the first one.

    Args:
        options: options of the recipe; "auto" is resolved with SLURM's variables

    Raises:
        UsageError: options conflict or are missing
    """

    def __init__(self, options):
        steps = int(os.environ.get("SLURM_STEP_NUM_NODES") or 1)
        self.host, self.port = "", 0
        if options.sbatch:
            _check_sbatch(options)
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
            if not options.dry_run and not options.sbatch:
                raise UsageError(
                    f"--nnodes {self.nnodes} requires --node-rank: 0 on the machine that prepares the data, "
                    f"up to {self.nnodes - 1} on the others"
                )
            rank = 0
        if rank >= self.nnodes:
            raise UsageError(f"--node-rank {rank}: with --nnodes {self.nnodes} the numbers are 0 to {self.nnodes - 1}")
        self.rank = rank
        if not options.sbatch:
            self._resolve_master(options, steps)

    def _resolve_master(self, options, steps):
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

    def launcher(self, rank, processes):
        """Return the command that starts the *processes* of the machine *rank*."""
        several = ["--nnodes", self.nnodes, "--node_rank", rank, "--master_addr", self.host, "--master_port", self.port]
        words = several if self.nnodes > 1 else ["--standalone"]
        return [*map(str, ["torchrun", *words, "--nproc_per_node", processes]), "--no_python"]

    def tell_peers(self, logs, words):
        """Write the reason of this machine's failure for the others, unless another machine caused it."""
        if self.nnodes > 1 and not re.match(r"machine \d+:", words) and "lost another process" not in words:
            with open(os.path.join(logs, f"node{self.rank}.failed"), "w", encoding="utf-8") as stream:
                stream.write(words + "\n")

    def watch_peers(self, logs):
        """Return the state of the other machines' failure files, to ignore earlier failures."""
        if self.nnodes == 1:
            return {}
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(logs, f"node{self.rank}.failed"))
        return look(logs, self.nnodes, self.rank)


def _slurm_master():
    try:
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        hosts = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        return f"{hosts[0]}:{20000 + int(os.environ['SLURM_JOB_ID']) % 20000}"
    except (OSError, KeyError, IndexError, subprocess.CalledProcessError):
        raise UsageError("scontrol does not name the machines of this step: give --master, the first of them") from None


def _check_sbatch(options):
    folder = os.path.dirname(options.sbatch) or "."
    if os.path.exists(options.sbatch):
        raise UsageError(f"--sbatch {options.sbatch} already exists: remove it, or choose another name")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"--sbatch {options.sbatch}: cannot write there; choose another directory")
    if "ngpu" not in options.given:
        raise UsageError("--sbatch requires --ngpu: the number of GPUs per machine of the job")


def look(logs, nnodes, rank):
    """Return {failure file of another machine: its stamp}."""
    paths = {n: os.path.join(logs, f"node{n}.failed") for n in range(nnodes) if n != rank}
    return {path: stamp(path) for path in paths.values()}


def failed(peers):
    """Return "machine N: WORDS" for the first machine that failed since *peers* was made; empty if none did."""
    for path, before in peers.items():
        if stamp(path) not in ("", before):
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as stream:
                number = re.search(r"node(\d+)\.failed$", path)[1]
                return f"machine {number}: {stream.read().strip() or 'failed'}"
    return ""


class Launch:
    """The processes that torchrun has started on this machine: signals, and the reason of their end.

    Attributes:
        words: the last line of output before the first process ended
    """

    def __init__(self, peers):
        self.peers, self.words, self.cause = peers, "", ""
        self.failures, self.ending, self.told, self.since = [], False, False, None

    def read(self, line):
        """Parse a line of output of torchrun or its processes."""
        field = FIELD.match(line)
        if AGENT.search(line) and not self.ending:
            if "death signal" in line:
                self.told = True
            self.ending = "closing signal" in line or "failed (exitcode" in line
            if self.ending and not self.told:
                self.since = time.monotonic()
        elif field and field[1] == "rank":
            self.failures.append([int(field[2]), 0])
        elif field and self.failures:
            self.failures[-1][1] = int(field[2])
        elif line.strip() and not self.ending and not line.startswith(" "):
            self.words = line.strip()

    def send(self, child, number):
        """Forward a signal to the processes; torchrun would die of SIGUSR1, or kill them some time after SIGTERM."""
        self.told = True
        for pid in children(child.pid) or [child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def tick(self, child):
        """Kill the remaining processes some time after the first process, here or elsewhere, has ended."""
        self.cause = self.cause or failed(self.peers)
        if self.cause and self.since is None:
            self.since = time.monotonic()
        if self.since is not None and time.monotonic() - self.since > GRACE:
            for pid in children(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def problem(self, saved):
        """Return the reason of a failure; empty if a signal has ended training and a checkpoint was saved.

        Args:
            saved: the exit status of a process that has saved a checkpoint
        """
        mild = (-signal.SIGTERM, -signal.SIGABRT)  # sent by torchrun, and by NCCL after the loss of another process
        killed = [found for found in self.failures if found[1] < 0 and found[1] not in mild]
        if killed and not self.cause:
            rank, status = killed[0]
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if -status == signal.SIGKILL else ""
            return f"process {rank} on {platform.node()} was ended by {name}{hint}"
        if not self.cause and any(status == saved for _, status in self.failures):
            return ""
        if "lost another process" in self.words or any(status == -signal.SIGABRT for _, status in self.failures):
            end = time.monotonic() + TELLING
            while not self.cause and self.peers and time.monotonic() < end:
                time.sleep(0.2)
                self.cause = failed(self.peers)
        return self.cause or self.words or "no output"


def children(pid):
    """Return the child processes of *pid*; empty if the system is not Linux."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, IndexError, ValueError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                        found.append(int(name))
    return found


def check_port(port):
    """Reject a port of this machine that is in use or not allowed."""
    try:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("", port))
            opened.listen(1)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if problem.errno == errno.EADDRINUSE else "is not allowed"
        raise UsageError(
            f"port {port} {why} on {platform.node()}: use another one on all machines, --master HOST:PORT"
        ) from None


def listens(host, port):
    """Return whether a program at the address accepts connections.

    Raises:
        Failed: the host name is unknown
    """
    try:
        socket.create_connection((host, port), timeout=3).close()
    except socket.gaierror:
        raise Failed(f"--master {host}: unknown host name on this machine; give its address") from None
    except OSError:
        return False
    return True


def wait(place, hours, peers, prepared, trained):
    """Return when machine 0 is ready to train with this one, or has trained already.

    Args:
        hours: maximum time in hours, as a string
        peers: see :meth:`Place.watch_peers`
        prepared, trained: (marker, key) of the data and of the training run (None if training is to be repeated)

    Raises:
        Failed: machine 0 fails, does not begin, or has other data
    """
    begun = time.monotonic()
    print(f"  waiting for machine 0, {place.host}:{place.port}, which prepares the data", flush=True)
    while not listens(place.host, place.port):
        if trained and read_marker(trained[0]) == trained[1]:
            return
        cause = failed(peers)
        if cause:
            raise Failed(cause)
        if time.monotonic() - begun > float(hours) * 3600:
            raise Failed(
                f"machine 0 did not start training within {hours} hours (--wait-hours): start it with the same "
                f"command and --node-rank 0, and open port {place.port} of {place.host} to this machine"
            )
        time.sleep(2)
    seen, (marker, key) = time.monotonic(), prepared
    folder = os.path.dirname(marker)
    while read_marker(marker) != key:
        if time.monotonic() - seen > FRESH:
            raise Failed(
                f"{folder} on this machine lacks the data that machine 0 has prepared with the same options: "
                f"put --exp on a disk that all machines share, or copy {folder} from {place.host}"
            )
        os.listdir(folder)  # refreshes the cache of a network file system
        time.sleep(1)
