"""Console scripts in forks of a process that has imported torch and fairseq, which saves most of the time of a start.

Run as a program it is that process: it listens on a socket for jobs, each with the three streams that it is to have,
and forks for each. This package is imported beforehand only for commands with it as ``--user-dir``; others find it, or
do not, as they would by themselves. ``in_fork.py`` asks it for a job.
"""

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BIN, ROOT = Path(sys.executable).parent, Path(__file__).resolve().parents[2]
SCRIPTS = [*(path.name for path in BIN.glob("fairseq-*")), "torchrun"]
PROGRAMS = [f"fairseq_cli.{name[8:].replace('-', '_')}" for name in SCRIPTS if name not in ("fairseq-deep", "torchrun")]


@functools.cache
def server(*modules):
    """Start the process, which also imports *modules* beforehand; return the first words of a command that runs there.

    These words are a program for a console script, or for "python3" with a file, or a program after -c.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, str(listener.fileno()), *modules]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment,
                         pass_fds=[listener.fileno()])  # fmt: skip
    return [sys.executable, "-IS", str(Path(__file__).with_name("in_fork.py")), path]


def in_fork(line):
    """The words of the command *line*, so that it runs in a fork."""
    return [*(server("fairseq_deep") if str(ROOT / "fairseq_deep") in line else server()), *line]


def stand_in(name):
    """A shell command that runs the console script *name* in a fork."""
    return f'exec {" ".join(server())} {name} "$@"'


class Forks(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks for each job, until the tests end."""

    tests = os.getppid()

    def service_actions(self):
        super().service_actions()
        if os.getppid() != self.tests:
            sys.exit()


class Job(socketserver.BaseRequestHandler):
    """Runs one job in a process of its own, and tells its number and exit status, negative for a signal."""

    def handle(self):
        streams = socket.recv_fds(self.request, 1, 3)[1]
        with self.request.makefile("rw") as lines:
            job = json.loads(lines.readline())
            pid = os.fork()
            if pid == 0:
                work(job, streams)
            print(pid, file=lines, flush=True)
            for stream in streams:
                os.close(stream)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=lines, flush=True)


def work(job, streams):
    """What the console script does, with its own streams, folder and environment."""
    for number, opened in enumerate(streams):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    path, *words = job["words"]
    name = os.path.basename(path)
    path = words.pop(0) if name == "python3" else str(BIN / name)
    sys.path[:1] = [os.path.dirname(path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    prepare = json.loads(os.environ.pop("PREPARE", "null"))
    if prepare:
        sys.path.insert(0, str(ROOT))
        pkgutil.resolve_name(prepare[0])(*prepare[1:])
        del sys.path[0]
    if name == "fairseq-generate":  # its own set-up comes too late: some of its tasks have one
        logging.basicConfig(level=logging.INFO)
    code = None
    try:
        if path == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [path, *words]
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    # as sys.exit(code), without taking apart all modules, which takes a third of the time
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def block(*packages):
    """Let imports of these packages fail, as if they were missing."""
    for name in {*packages, *sys.modules}:
        if name.partition(".")[0] in packages:
            sys.modules[name] = None


def main(listener, *modules):
    sys.path.insert(0, str(ROOT))
    for module in (*PROGRAMS, "torch._dynamo", *modules):
        importlib.import_module(module)
    del sys.path[0]
    for module in PROGRAMS:  # a fork imports its own again, which sets up the logs
        del sys.modules[module]
    logging.basicConfig(force=True, handlers=[], level=logging.WARNING)
    gc.collect()
    gc.freeze()  # what is there stays, and collections in the forks do not look at it
    forks = Forks("", Job, bind_and_activate=False)
    forks.socket = socket.socket(fileno=int(listener))
    forks.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
