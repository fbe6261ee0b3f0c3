"""Trainings in which one chosen write to a folder goes wrong, which get a signal at a chosen update, or are looked at.

What counts as a write: opening a file for writing, each block that goes to the system, fsync, rename and remove.
"""

import atexit
import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.helpers.forkserver import server_of

KINDS = ("EIO", "ENOSPC", "kill")
KILLED = -signal.SIGKILL


class Faults:
    """At each write, a fork for each of KINDS makes it fail, and for ENOSPC all later ones that need room.

    A case is named after its kind and the number of its write, such as EIO.3. The fork leaves the directory EIO.3 and
    its output EIO.3.log in *cases*; its exit status is in ``ended``. Then all files are restored, and the training
    continues.
    """

    def __init__(self, folder, cases):
        self.folder, self.cases, self.kind, self.at, self.count = os.path.realpath(folder), Path(cases), "", 0, 0
        self.ended, self.forking = {}, False

    def covers(self, path):
        named = isinstance(path, (str, os.PathLike)) and not self.forking
        return named and os.path.realpath(path).startswith(self.folder)

    def point(self, needs_room=True, half=None):
        """One write: returns, raises, or never returns. If it fails, *half* of it is done."""
        self.count += 1
        for kind in () if self.at else KINDS:
            if self.forks(f"{kind}.{self.count}"):
                self.kind, self.at = kind, self.count
                break
        if self.count == self.at and half:
            half()
        if self.count == self.at and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.at and self.kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.at and self.count >= self.at and self.kind == "ENOSPC" and needs_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def forks(self, case):
        """Whether this is the fork that takes *case*; in the other process, it has ended and left no trace."""
        self.forking, folder, kept = True, Path(self.folder), Path(tempfile.mkdtemp(dir=self.cases.parent))
        paths = sorted(folder.rglob("*"))
        files = [(path, path.read_bytes()) for path in paths if path.is_file()]
        for number, (path, _) in enumerate(files):
            os.link(path, kept / str(number))  # what is open has to stay the same file
        places = positions()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            log = os.open(f"{self.cases / case}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            self.forking = False
            return True
        self.ended[case] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        shutil.copytree(folder, self.cases / case)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for path in paths:
            if path not in dict(files):
                path.mkdir()
        for number, (path, content) in enumerate(files):
            (kept / str(number)).write_bytes(content)
            os.link(kept / str(number), path)
        for number, place in places.items():
            os.lseek(number, place, os.SEEK_SET)
        self.forking = False
        return False

    def install(self):
        faults, real_open = self, builtins.open
        names = {name: getattr(os, name) for name in ("replace", "rename", "remove", "unlink")}
        fsync = os.fsync

        class Raw(io.FileIO):
            def write(self, data):
                write, half = super().write, memoryview(data).cast("B")[: len(data) // 2]
                faults.point(half=lambda: write(half))  # the disk takes some of it
                return write(data)

        def opening(path, mode="r", *rest, **options):
            if not faults.covers(path) or not set(mode) & set("wax+"):
                return real_open(path, mode, *rest, **options)
            faults.point()
            if "+" in mode:
                return real_open(path, mode, *rest, **options)
            raw = io.BufferedWriter(Raw(path, mode.replace("b", "").replace("t", "")), 65536)
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

        def wrapped(function):
            def changed(path, *rest, **options):
                if faults.covers(path):
                    faults.point(needs_room=False)
                return function(path, *rest, **options)

            return changed

        def synced(number):
            faults.point()
            return fsync(number)

        builtins.open = io.open = opening
        os.fsync = synced
        for name, function in names.items():
            setattr(os, name, wrapped(function))


def positions():
    """Where this process is in each file that it has open, {number: position}."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # pipes have none
            found[number] = os.lseek(number, 0, os.SEEK_CUR)
    return found


def install(folder, cases, ended):
    """Called in the process of the training: `Faults`, with the exit status of each case in the file *ended*."""
    faults = Faults(folder, cases)
    write = Path(ended).write_text
    atexit.register(lambda: write(json.dumps(faults.ended)))
    faults.install()


def send(number, update):
    """Called there, too: the training sends itself a signal in the middle of the update after *update*."""
    from fairseq.trainer import Trainer

    real = Trainer.train_step

    def train_step(trainer, *rest, **options):
        if trainer.get_num_updates() == update:
            os.kill(os.getpid(), number)
        return real(trainer, *rest, **options)

    Trainer.train_step = train_step


def poison(name, value, updates, backward=False):
    """Called there, too: the output of the module *name*, or its gradient, is multiplied by *value* in an update.

    Args:
        updates: the numbers of these updates, in order; one that is there twice is so once more after a rewind
    """
    import torch
    from fairseq.trainer import Trainer

    real = Trainer.train_step

    def change(module, inputs, output):
        tensor, *others = (output,) if torch.is_tensor(output) else output
        if backward:
            tensor.register_hook(lambda grad: grad * value)
            return None
        return tensor * value if torch.is_tensor(output) else (tensor * value, *others)

    def train_step(trainer, *rest, **options):
        if not updates or trainer.get_num_updates() + 1 != updates[0]:
            return real(trainer, *rest, **options)
        updates.pop(0)
        hook = trainer.get_model().get_submodule(name).register_forward_hook(change, prepend=True)
        try:
            return real(trainer, *rest, **options)
        finally:
            hook.remove()

    Trainer.train_step = train_step


def watch(report):
    """Called in the process of the training, before it: look at each gradient, and at the model that is saved."""
    import fairseq_cli.train as program
    from fairseq.trainer import Trainer

    train, clip, missing = program.main, Trainer.clip_grad_norm, set()

    def clip_grad_norm(trainer, *rest, **options):
        for name, parameter in trainer.get_model().named_parameters():
            if parameter.requires_grad and (parameter.grad is None or not parameter.grad.isfinite().all()):
                missing.add(name)
        return clip(trainer, *rest, **options)

    def main(cfg):
        train(cfg)
        Path(report).write_text(json.dumps({"missing": sorted(missing), "fault": fault_of_saved(cfg)}))

    Trainer.clip_grad_norm, program.main = clip_grad_norm, main


def fault_of_saved(cfg):
    """What does not hold for the model that was saved."""
    import torch
    from fairseq import checkpoint_utils

    from tests.helpers import invariances

    path = Path(cfg.checkpoint.save_dir) / "checkpoint_last.pt"
    overrides = {"data": cfg.task.data}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides)
    model.double()  # some methods, such as EM routing, amplify the rounding of fp32 a thousandfold
    for check in (
        invariances.steps_of_decoding_equal_whole_sentences,
        invariances.padding_and_batch_composition_change_nothing,
    ):
        torch.manual_seed(1)
        try:
            check(lambda: model, task.source_dictionary)
        except Exception as error:
            return f"{check.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def train(command, log, prepare=None):
    """Exit status of fairseq-train's *command* (its name, then arguments), negative for a signal.

    All output is in the file *log*. *prepare* is "install", "send", "poison" or "watch" with its arguments.
    """
    if prepare:
        prepare = [f"tests.helpers.faults:{prepare[0]}", *prepare[1:]]
    words = [str(word) for word in command]
    done = server_of(words).call(words, prepare=prepare)
    Path(log).write_text(done.stdout + done.stderr)
    return done.returncode
