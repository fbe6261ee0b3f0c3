"""Disks that fail or stop at a chosen write, and trainings that get a signal or wrong numbers at a chosen update."""

import builtins
import contextlib
import errno
import io
import itertools
import os
import shutil
from unittest import mock

KINDS = ("EIO", "ENOSPC", "kill")


class Disk(contextlib.ExitStack):
    """Within it, write number *at* to a folder goes wrong, and for ENOSPC all later ones that need room.

    A write is: opening a file for writing, each block that goes to the system, fsync, rename and remove. Half of a
    block is written before it fails. A kill only keeps the folder, as it is at this moment, in FOLDER.left.
    """

    def __init__(self, folder, kind, at):
        super().__init__()
        self.folder, self.kind, self.at, self.count = os.path.realpath(folder), kind, at, 0

    def __enter__(self):
        for module in (builtins, io):
            self.enter_context(mock.patch.object(module, "open", self.open))
        self.enter_context(mock.patch.object(os, "fsync", self.wrapped(os.fsync, any_file=True)))
        for name in ("replace", "rename", "remove", "unlink"):
            self.enter_context(mock.patch.object(os, name, self.wrapped(getattr(os, name), needs_room=False)))
        return super().__enter__()

    def covers(self, path):
        return isinstance(path, (str, os.PathLike)) and os.path.realpath(path).startswith(self.folder + os.sep)

    def point(self, needs_room=True, half=None):
        """One write, which raises if it fails; *half* does half of it."""
        self.count += 1
        if self.count == self.at and half:
            half()
        if self.count == self.at and self.kind == "kill":
            shutil.copytree(self.folder, f"{self.folder}.left")
        elif self.count == self.at or self.kind == "ENOSPC" and self.count > self.at and needs_room:
            raise OSError(getattr(errno, self.kind), os.strerror(getattr(errno, self.kind)))

    def open(self, path, mode="r", *rest, real=open, **options):
        if not self.covers(path) or not set(mode) & set("wax+"):
            return real(path, mode, *rest, **options)
        self.point()
        if "+" in mode:
            return real(path, mode, *rest, **options)
        raw = io.BufferedWriter(Raw(self, path, mode.replace("b", "").replace("t", "")), 65536)
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def wrapped(self, function, needs_room=True, any_file=False):
        def write(path, *rest, **options):
            if any_file or self.covers(path):
                self.point(needs_room)
            return function(path, *rest, **options)

        return write


class Raw(io.FileIO):
    """A file of a `Disk`."""

    def __init__(self, disk, *arguments):
        super().__init__(*arguments)
        self.disk = disk

    def write(self, data):
        write, half = super().write, memoryview(data).cast("B")[: len(data) // 2]
        self.disk.point(half=lambda: write(half))
        return write(data)


def each_fault(folder, act):
    """Do *act* with each fault at each write to *folder*, which is as it was before.

    Yields:
        the kind of the fault, and the error that *act* raised, or None; the folder is as the fault has left it
    """
    before = shutil.copytree(folder, f"{folder}.before")

    def replace(other):
        shutil.rmtree(folder)
        shutil.copytree(other, folder)

    for kind in KINDS:
        for at in itertools.count(1):
            error = None
            replace(before)
            try:
                with Disk(folder, kind, at) as disk:
                    act()
            except Exception as raised:
                error = raised
            if disk.count < at:
                break
            if kind == "kill":
                replace(f"{folder}.left")
                shutil.rmtree(f"{folder}.left")
            yield kind, error


def before_each_update(act):
    """Called in the process of a training: ``act(trainer)`` may return a handle of a hook, which the update removes."""
    from fairseq.trainer import Trainer

    real = Trainer.train_step

    def train_step(trainer, *rest, **options):
        with act(trainer) or contextlib.nullcontext():
            return real(trainer, *rest, **options)

    Trainer.train_step = train_step


def send(number, update):
    """Called there, too: it sends itself a signal in the middle of the update after *update*."""
    before_each_update(lambda trainer: trainer.get_num_updates() == update and os.kill(os.getpid(), number))


def poison(name, value, updates, backward=False, rank="0"):
    """Called there, too: the output of the module *name*, or its gradient, is multiplied by *value* in an update.

    Args:
        updates: the numbers of these updates, in order; one that is there twice is so once more after a rewind
        rank: of the process
    """
    if os.environ.get("RANK", "0") != rank:
        return
    import torch

    def change(module, inputs, output):
        tensor, *others = (output,) if torch.is_tensor(output) else output
        if backward:
            tensor.register_hook(lambda grad: grad * value)
            return None
        return tensor * value if torch.is_tensor(output) else (tensor * value, *others)

    def act(trainer):
        if updates and trainer.get_num_updates() + 1 == updates[0]:
            updates.pop(0)
            return trainer.get_model().get_submodule(name).register_forward_hook(change, prepend=True)
        return None

    before_each_update(act)
