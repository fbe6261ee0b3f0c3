"""What several machines have to do with each other in a recipe: waiting for the first, and a common end.

    python3 nodes.py port --port P                  # whether machine 0 can be found there
    python3 nodes.py look --logs DIR ...            # what other machines have left there so far, for --peers
    python3 nodes.py wait --host H --port P ...     # until machine 0 trains

A machine that fails leaves one line in ``logs/nodeN.failed``. What is new there ends the training of the others, which
may be waiting for a process that is gone.
"""

import argparse
import contextlib
import errno
import json
import os
import platform
import re
import signal
import socket
import sys
import time

from corpus import die, run

GRACE = 30
"""Seconds that the processes of a training have to end by themselves when another one is gone."""
TELLING = 30
"""Seconds in which another machine's reason is awaited, where the own one is only that another process is gone."""
FRESH = 60
"""Seconds until a shared folder shows what another machine has written."""

FIELD = re.compile(r"^\s+(rank|exitcode)\s*: (-?\d+)")
AGENT = re.compile(r"torch[./]distributed[./]elastic")


def stamp(path):
    """What tells a file from its successor; empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_mtime_ns} {found.st_size} {found.st_ino}"


def look(logs, nnodes, rank):
    """{file that another machine leaves when it fails: its stamp}."""
    paths = {n: os.path.join(logs, f"node{n}.failed") for n in range(nnodes) if n != rank}
    return {path: stamp(path) for path in paths.values()}


def failed(peers):
    """"machine N: WORDS" of the first machine that has failed since *peers* was made; empty if none has."""
    for path, before in peers.items():
        if stamp(path) not in ("", before):
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as stream:
                number = re.search(r"node(\d+)\.failed$", path)[1]
                return f"machine {number}: {stream.read().strip() or 'failed'}"
    return ""


class Launch:
    """The processes that torchrun has started here: signals for them, and why they have ended.

    Attributes:
        words: the last line before the end of the first of them
    """

    def __init__(self, peers):
        self.peers, self.words, self.cause = peers, "", ""
        self.failures, self.ending, self.told, self.since = [], False, False, None

    def read(self, line):
        """A line that torchrun or its processes have printed."""
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
        """Hand a signal on: torchrun itself would die of SIGUSR1, and kills after a while at SIGTERM."""
        self.told = True
        for pid in children(child.pid) or [child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def tick(self, child):
        """Every second: kill what is left some time after the first process has gone, here or elsewhere."""
        self.cause = self.cause or failed(self.peers)
        if self.cause and self.since is None:
            self.since = time.monotonic()
        if self.since is not None and time.monotonic() - self.since > GRACE:
            for pid in children(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def problem(self, saved):
        """Why the training has failed, in words; empty if a signal has ended it and all have saved.

        Args:
            saved: the exit status of a process that has saved
        """
        mild = (-signal.SIGTERM, -signal.SIGABRT)  # of torchrun, and of NCCL where another process is gone
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
    """The processes that *pid* has started, where the system tells (Linux)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, IndexError, ValueError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                        found.append(int(name))
    return found


def check_port(port):
    """Refuse a port of this machine that is in use."""
    try:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("", port))
            opened.listen(1)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if problem.errno == errno.EADDRINUSE else "is not for users"
        die(f"port {port} {why} on {platform.node()}: take another one on all machines, --master HOST:PORT")


def holds(path, key):
    """Whether the marker *path* is there and says *key*."""
    try:
        with open(path, encoding="utf-8") as stream:
            return bool(path) and stream.read().strip() == key
    except OSError:
        return False


def listens(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
    except socket.gaierror:
        sys.exit(f"--master {host}: this machine knows no machine of that name; give its address")
    except OSError:
        return False
    return True


def wait(args):
    """Return when machine 0 waits for this one, or has trained without it; exit with a line if it does not."""
    begun, peers = time.monotonic(), json.loads(args.peers)
    print(f"waiting for machine 0, {args.host}:{args.port}, which prepares the data", flush=True)
    while not listens(args.host, args.port):
        if args.done and holds(args.done, args.done_key):
            return
        cause = failed(peers)
        if cause:
            sys.exit(cause)
        if time.monotonic() - begun > args.hours * 3600:
            sys.exit(
                f"machine 0 has not begun to train within {args.hours} hours (--wait-hours): start it with the same "
                f"command and --node-rank 0, and open port {args.port} of {args.host} to this machine"
            )
        time.sleep(2)
    seen = time.monotonic()
    while not holds(args.marker, args.key):
        if time.monotonic() - seen > FRESH:
            folder = os.path.dirname(args.marker)
            sys.exit(
                f"this machine does not see in {folder} what machine 0 has prepared there with the same options: "
                f"put --exp on a disk that all machines share, or copy {folder} from {args.host}"
            )
        os.listdir(os.path.dirname(args.marker))  # has a network file system look again
        time.sleep(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("port", "look", "wait"))
    parser.add_argument("--host")
    parser.add_argument("--logs")
    for flag in ("--port", "--nnodes", "--node-rank"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--peers", default="{}", help="what `look` has printed")
    parser.add_argument("--marker", help="the marker of the prepared data, in the folder of the experiment; its key")
    parser.add_argument("--key")
    parser.add_argument("--done", help="that of the training, where it need not be done again")
    parser.add_argument("--done-key")
    args = parser.parse_args()
    if args.action == "port":
        check_port(args.port)
    elif args.action == "look":
        print(json.dumps(look(args.logs, args.nnodes, args.node_rank)))
    else:
        wait(args)


if __name__ == "__main__":
    run(main)
