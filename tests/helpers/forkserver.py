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
from importlib.metadata import entry_points
from pathlib import Path

BIN, ROOT = Path(sys.executable).parent, Path(__file__).resolve().parents[2]
SCRIPTS = {script.name: script.value for script in entry_points(group="console_scripts")
           if script.name.startswith("fairseq-") or script.name == "torchrun"}  # fmt: skip
PROGRAMS = [place.split(":")[0] for place in SCRIPTS.values() if place.startswith("fairseq_cli")]
EARLY = [*PROGRAMS, "torch._dynamo"]


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
    name = os.path.basename(job["words"][0])
    sys.argv = [str(BIN / name), *job["words"][1:]]
    sys.path[0] = str(BIN)
    prepare = json.loads(os.environ.pop("PREPARE", "null"))
    if prepare:
        sys.path.insert(1, str(ROOT))
        pkgutil.resolve_name(prepare[0])(*prepare[1:])
        del sys.path[1]
    if name == "fairseq-generate":  # its own set-up comes too late: some of its tasks have one
        logging.basicConfig(level=logging.INFO)
    try:
        code = run_python() if name == "python3" else pkgutil.resolve_name(SCRIPTS[name])()
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


def run_python():
    """A file, or the program after -c, as an interpreter runs it."""
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def read_command_line():
    """A usual one, so that what this takes is ready."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    usual = "--arch transformer --optimizer adam --lr-scheduler inverse_sqrt --criterion label_smoothed_cross_entropy"
    convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), ["data", *usual.split()]))


def main(listener, *modules):
    sys.path.insert(0, str(ROOT))
    for module in (*EARLY, *modules):
        importlib.import_module(module)
    del sys.path[0]
    read_command_line()
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
