"""Checkpoints that are whole or absent, whatever ends the process that writes them, and the newest of them."""

import contextlib
import errno
import logging
import os
import platform
import re
import shutil
import time
import zipfile

from fairseq.file_io import PathManager
from fairseq.safe_load import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)
TEMPORARY = ".tmp"


def write(path, function):
    """Let `function` write the file `path`, which is replaced only when all of it is on the disk.

    Args:
        path: the file; it is written beside it, under its name and `.tmp`
        function: takes a binary file that is open for writing

    Raises:
        CheckpointError: it cannot be written; what was at `path` is as before
    """
    temporary = path + TEMPORARY
    try:
        with open(temporary, "wb") as opened:
            function(opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        reason = system_error(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"{path}: cannot be saved ({reason.strerror or reason}); the checkpoints saved before are whole: "
            "see to the disk and give the same command again"
        ) from error


def copy(source, path):
    """The same for a copy of the file `source`."""

    def fill(opened):
        with open(source, "rb") as original:
            shutil.copyfileobj(original, opened, 1 << 20)

    if PathManager.supports_rename(path):
        write(path, fill)
    else:
        PathManager.copy(source, path, overwrite=True)


def remove(path):
    """Remove an old checkpoint; one that cannot be removed is no reason to stop."""
    try:
        os.remove(path)
    except OSError as error:
        logger.warning(f"{path} stays: {error.strerror or error}")


LOCKS = []
"""Open files whose locks this process holds until it ends."""


def make_folder(path, no_save):
    """Make the folder of checkpoints, and keep other trainings out of it until this process ends.

    Args:
        no_save: nothing is saved there, unless the training crashes: others may use it

    Raises:
        CheckpointError: nothing can be written there, or another training does
    """
    try:
        os.makedirs(path, exist_ok=True)
        if no_save:
            return
        lock = open(os.path.join(path, ".lock"), "a+")
    except OSError as error:
        raise CheckpointError(f"{path}: no checkpoint can be saved there ({error.strerror or error})") from error
    LOCKS.append(lock)
    if fcntl is None:
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process, not of those that read data for it
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        owner = lock.read().strip() or "another training"
        raise CheckpointError(f"{path} is in use by {owner}: wait for its end, or use another --save-dir") from None
    except OSError:
        return  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    lock.flush()


def sync_folder(folder):
    """Have a new name in `folder` on the disk, where the system can do that."""
    try:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC):
            raise


def system_error(error):
    """The OSError that `error` is or was caused by; torch makes a RuntimeError of one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def to_restore(path, no_last):
    """`path`, the checkpoint to go on from; if it is missing or torn, the newest whole one beside it.

    Args:
        no_last: whether the training writes no such file, so that nothing is missing where there is none

    Raises:
        CheckpointError: it is torn, and there is no other
    """
    if PathManager.path_requires_pathmanager(path) or is_whole(path):
        return path
    torn = os.path.exists(path)
    if not torn and no_last:
        return path
    for other in numbered(path):
        if is_whole(other):
            state = "is torn" if torn else "is missing"
            logger.warning(f"{path} {state}: going on from {other}, the newest whole checkpoint beside it")
            return other
    if torn:
        raise CheckpointError(
            f"{path}: torn, and no whole checkpoint is beside it; remove it to train from the beginning"
        )
    return path


def is_whole(path):
    """Whether `path` ends as a file of `torch.save` does; files of older torch have no end that tells."""
    try:
        with open(path, "rb") as opened:
            zipped = opened.read(4) == b"PK\x03\x04"
            return zipfile.is_zipfile(opened) if zipped else os.fstat(opened.fileno()).st_size > 0
    except OSError:
        return False


def numbered(path):
    """The checkpoints of epochs and updates beside checkpoint_lastSUFFIX.pt, by time of writing, newest first."""
    folder, name = os.path.split(path)
    suffix = re.escape(name[len("checkpoint_last") :])
    with contextlib.suppress(OSError):
        names = [n for n in os.listdir(folder or ".") if re.fullmatch(rf"checkpoint(\d+|_\d+_\d+){suffix}", n)]
        return sorted((os.path.join(folder, n) for n in names), key=os.path.getmtime, reverse=True)
    return []
