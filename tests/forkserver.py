"""Console scripts in forks of a process that has imported torch and fairseq, which saves most of the time of a start.

Run as a program it is that process: it reads a job a line from stdin, forks, and answers on the descriptor that it is
given. This package is not imported beforehand, so that a command finds it, or does not, as it would by itself.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPTS = {
    **{f"fairseq-{name}": f"fairseq_cli.{name}:cli_main"
       for name in ("generate", "interactive", "preprocess", "score", "train", "validate")},
    "fairseq-deep": "fairseq_deep.tools.main:main",
}  # fmt: skip
EARLY = [place.split(":")[0] for place in SCRIPTS.values() if place.startswith("fairseq_cli")] + ["torch._dynamo"]


class Server:
    """The process, as the tests see it."""

    def __init__(self):
        answers, answering = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.child = subprocess.Popen([sys.executable, __file__, str(answering)], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.DEVNULL, env=environment, pass_fds=[answering])  # fmt: skip
        os.close(answering)
        self.answers = os.fdopen(answers)
        atexit.register(self.close)

    def close(self):
        self.child.stdin.close()
        self.child.wait()

    def call(self, words, stdin=None, cwd=None, environment=None, prepare=None, timeout=300):
        """The ended process of the command *words*.

        Args:
            prepare: "module:function" and its arguments, called in the process before the command
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")}
            Path(paths["stdin"]).write_text(stdin or "")
            job = {"words": words, "cwd": os.fspath(cwd or os.getcwd()), "prepare": prepare, **paths}
            job["environment"] = environment or dict(os.environ)
            print(json.dumps(job), file=self.child.stdin, flush=True)
            pid = int(self.answers.readline())
            if not select.select([self.answers], [], [], timeout)[0]:
                os.kill(pid, signal.SIGKILL)
                self.answers.readline()
                raise subprocess.TimeoutExpired(words, timeout)
            status = int(self.answers.readline())
            output = [Path(paths[name]).read_text(errors="replace") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(words, status, *output)


@functools.cache
def server():
    return Server()


def serve(answering):
    """Fork for each job; returns in the fork, with its job, and in the server, with nothing, when there are no more."""
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(answering)
            return job
        os.write(answering, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(answering, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return None


def work(job):
    """What the console script does, with its own streams, folder and environment."""
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        opened = os.open(job[name], flags | (os.O_CREAT if number else 0))
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
        sys.path.insert(1, str(Path(__file__).parents[1]))
        find(place)(*arguments)
        del sys.path[1]
    set_up_logging(name)
    sys.exit(find(SCRIPTS[name])())


def find(place):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def read_a_command_line():
    """Once, so that the parsers that this takes are ready."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", "transformer"])
    convert_namespace_to_omegaconf(args)


def set_up_logging(name):
    """As importing the one script *name* does, and not the others."""
    import logging

    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    if name in ("fairseq-interactive", "fairseq-preprocess", "fairseq-train", "fairseq-validate"):
        level = os.environ.get("LOGLEVEL", "INFO").upper()
        form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
        logging.basicConfig(format=form, datefmt="%Y-%m-%d %H:%M:%S", level=level, stream=sys.stdout)
    elif name == "fairseq-generate":  # which comes too late: something that it imports has done so
        logging.basicConfig(level=logging.INFO)


def main():
    for module in EARLY:
        importlib.import_module(module)
    read_a_command_line()
    gc.collect()
    gc.freeze()  # what is there stays, and collections in the forks do not look at it
    job = serve(int(sys.argv[1]))
    if job:
        work(job)


if __name__ == "__main__":
    main()
