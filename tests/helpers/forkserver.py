"""Console scripts in forks of a process that has imported torch and fairseq, which saves most of the time of a start.

Run as a program it is that process: it listens on a socket for jobs, each with the three streams that it is to have,
and forks for each. This package is imported beforehand only for commands with it as ``--user-dir``; others find it, or
do not, as they would by themselves. Run with "call" it is a stand-in for a console script, for the PATH of a recipe.
"""

import atexit
import copy
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BIN, ROOT = Path(sys.executable).parent, Path(__file__).resolve().parents[2]
SCRIPTS = {
    **{f"fairseq-{name}": f"fairseq_cli.{name}:cli_main"
       for name in ("generate", "interactive", "preprocess", "score", "train", "validate")},
    "fairseq-hydra-train": "fairseq_cli.hydra_train:cli_main",
    "fairseq-deep": "fairseq_deep.cli:main",
    "torchrun": "torch.distributed.run:main",
}  # fmt: skip
PROGRAMS = [place.split(":")[0] for place in SCRIPTS.values() if place.startswith("fairseq_cli")]
EARLY = [*PROGRAMS, "torch._dynamo"]


class Server:
    """The process, as the tests see it; *modules*: those that it also imports beforehand."""

    def __init__(self, *modules):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, str(listener.fileno()), *modules]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
                                      pass_fds=[listener.fileno()])  # fmt: skip
        listener.close()
        atexit.register(self.close)

    def close(self):
        self.child.stdin.close()
        self.child.wait()
        self.folder.cleanup()

    def call(self, words, stdin=None, cwd=None, environment=None, prepare=None, timeout=300):
        """The ended process of the command *words*.

        Args:
            prepare: "module:function" and its arguments, called in the process before the command
        """
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write((stdin or "").encode())
            streams = [source, out, err]
            source.seek(0)
            started = Call(self.path, words, [stream.fileno() for stream in streams], cwd, environment, prepare)
            status = started.wait(timeout)
            for stream in (out, err):
                stream.seek(0)
            return subprocess.CompletedProcess(words, status, *(s.read().decode(errors="replace") for s in (out, err)))

    def stand_in(self, name):
        """A shell command that runs the console script *name* here; "python3" runs a file, or a program after -c."""
        return f'exec {sys.executable} -I {__file__} call {self.path} {name} "$@"'


class Call:
    """A process that the server at *path* was asked for."""

    def __init__(self, path, words, streams, cwd=None, environment=None, prepare=None):
        self.words, self.connection = words, socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        socket.send_fds(self.connection, [b"."], streams)
        job = {"words": words, "cwd": os.fspath(cwd or os.getcwd()), "prepare": prepare}
        job["environment"] = environment or dict(os.environ)
        self.answers = self.connection.makefile("rw")
        print(json.dumps(job), file=self.answers, flush=True)
        self.pid = int(self.answers.readline())

    def wait(self, timeout=None):
        """Its exit status, negative for a signal."""
        if not select.select([self.connection], [], [], timeout)[0]:
            os.kill(self.pid, signal.SIGKILL)
            self.answers.readline()
            raise subprocess.TimeoutExpired(self.words, timeout)
        status = int(self.answers.readline())
        self.answers.close()
        self.connection.close()
        return status


def stand_in(path, *words):
    """Be the command *words*: its streams, its signals, its end. The folder PIDS, if named, is told its process."""
    call = Call(path, words, [0, 1, 2])
    if "PIDS" in os.environ:
        Path(os.environ["PIDS"], f"{words[0]}.{os.environ.get('RANK', '')}").write_text(str(call.pid))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os.kill(call.pid, number))
    status = call.wait()
    if status < 0:
        if -status != signal.SIGKILL:  # which nothing can change
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


@functools.cache
def server(*modules):
    return Server(*modules)


def server_of(words):
    """The server for a command."""
    return server("fairseq_deep") if str(ROOT / "fairseq_deep") in words else server()


def serve(listener):
    """Fork for each job; returns in the fork, with its job, and in the server, with nothing, when the tests end."""
    running = {}
    while True:
        ready = select.select([sys.stdin, listener, *running], [], [])[0]
        if sys.stdin in ready:
            return None
        for ended in running.keys() & set(ready):
            pid, connection = running.pop(ended)
            connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            connection.close()
            os.close(ended)
        if listener in ready:
            connection = listener.accept()[0]
            streams = socket.recv_fds(connection, 1, 3)[1]
            with connection.makefile() as lines:
                job = {**json.loads(lines.readline()), "streams": streams}
            pid = os.fork()
            if pid == 0:
                for taken in (connection, listener, *(other for _, other in running.values())):
                    taken.close()
                return job
            for stream in streams:
                os.close(stream)
            connection.sendall(f"{pid}\n".encode())
            running[os.pidfd_open(pid)] = pid, connection


def work(job):
    """What the console script does, with its own streams, folder and environment."""
    for number, opened in enumerate(job["streams"]):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    name = os.path.basename(job["words"][0])
    sys.argv = [str(BIN / name), *job["words"][1:]]
    sys.path[0] = str(BIN)
    if job["prepare"]:
        place, *arguments = job["prepare"]
        sys.path.insert(1, str(Path(__file__).parents[2]))
        find(place)(*arguments)
        del sys.path[1]
    if name == "fairseq-generate":  # its own set-up comes too late: some of its tasks have one
        logging.basicConfig(level=logging.INFO)
    try:
        sys.exit(run_python() if name == "python3" else find(SCRIPTS[name])())
    except SystemExit as end:
        leave(end.code)
    except Exception:
        sys.excepthook(*sys.exc_info())
        leave(1)


def run_python():
    """A file, or the program after -c, as an interpreter runs it."""
    del sys.argv[0]
    if sys.argv[0] == "-c":
        sys.path[0] = ""
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def leave(code):
    """As sys.exit(code) ends a program, without taking apart all modules, which takes a third of its time."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def find(place):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def quicken_hydra():
    """What hydra makes of a word, and of its defaults for the same choices, is made once."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser

    def once(function, key_of):
        made = {}

        def remember(*given, **named):
            key = key_of(*given, **named)
            if key not in made:
                made[key] = function(*given, **named)
            return copy.deepcopy(made[key])

        return remember

    OverridesParser.parse_rule = once(OverridesParser.parse_rule, lambda parser, text, rule: (text, rule))
    ConfigLoaderImpl._compose_config_from_defaults_list = once(
        ConfigLoaderImpl._compose_config_from_defaults_list, lambda loader, defaults, repo: tuple(map(str, defaults))
    )
    ConfigStore.__deepcopy__ = lambda store, memo: store  # its load() gives copies


def read_command_line():
    """A usual one, so that what this takes is ready."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    usual = "--arch transformer --optimizer adam --lr-scheduler inverse_sqrt --criterion label_smoothed_cross_entropy"
    convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), ["data", *usual.split()]))


def main():
    sys.path.insert(0, str(ROOT))
    for module in (*EARLY, *sys.argv[2:]):
        importlib.import_module(module)
    del sys.path[0]
    quicken_hydra()
    read_command_line()
    for module in PROGRAMS:  # a fork imports its own again, which sets up the logs
        del sys.modules[module]
    logging.basicConfig(force=True, handlers=[], level=logging.WARNING)
    gc.collect()
    gc.freeze()  # what is there stays, and collections in the forks do not look at it
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    if job:
        work(job)


if __name__ == "__main__":
    stand_in(*sys.argv[2:]) if sys.argv[1] == "call" else main()
