"""Atomic checkpoints, locks on their directories, and the newest complete checkpoint."""

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
    """Write a file atomically: `path` is replaced only after all data is on the disk.

    Args:
        path: the file; a temporary file next to it has the suffix `.tmp`
        function: writes the content to a binary file, its argument

    Raises:
        CheckpointError: the file cannot be written; `path` is then unchanged
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
            f"{path}: cannot be saved ({reason.strerror or reason}); earlier checkpoints are complete: check the "
            "disk and run the same command again"
        ) from error


def copy(source, path):
    """Copy the file `source` to `path` atomically."""

    def fill(opened):
        with open(source, "rb") as original:
            shutil.copyfileobj(original, opened, 1 << 20)

    if PathManager.supports_rename(path):
        write(path, fill)
    else:
        PathManager.copy(source, path, overwrite=True)


def remove(path):
    """Remove an old checkpoint; log a warning if it cannot be removed."""
    try:
        os.remove(path)
    except OSError as error:
        logger.warning(f"{path} cannot be removed: {error.strerror or error}")


LOCKS = []
"""Lock files that this process keeps open until it exits."""


def make_folder(path, no_save):
    """Create the checkpoint directory and lock it until this process exits.

    Args:
        no_save: create it without a lock, since only a crash writes to it

    Raises:
        CheckpointError: the directory is not writable, or another training run uses it
    """
    try:
        os.makedirs(path, exist_ok=True)
        if no_save:
            return
        lock = open(os.path.join(path, ".lock"), "a+")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot save checkpoints there ({error.strerror or error}): use another --save-dir"
        ) from error
    LOCKS.append(lock)
    if fcntl is None:
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by data workers
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        owner = lock.read().strip() or "another training run"
        raise CheckpointError(f"{path} is in use by {owner}: try again later, or use another --save-dir") from None
    except OSError:
        return  # the file system does not support locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    lock.flush()


def sync_folder(folder):
    """Flush the entries of a directory to the disk, if the system supports it."""
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
    """Return the OSError that is or caused `error`, or None; torch converts some to RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def to_restore(path, no_last):
    """Return the checkpoint to resume from: `path`, or the newest complete one next to it.

    Args:
        no_last: training does not write `path`, so its absence is expected

    Raises:
        CheckpointError: `path` is truncated, and there is no other checkpoint
    """
    if PathManager.path_requires_pathmanager(path) or is_whole(path):
        return path
    truncated = os.path.exists(path)
    if not truncated and no_last:
        return path
    for other in numbered(path):
        if is_whole(other):
            state = "is truncated" if truncated else "is missing"
            logger.warning(f"{path} {state}: resuming from {other}, the newest complete checkpoint next to it")
            return other
    if truncated:
        raise CheckpointError(
            f"{path}: truncated, without a complete checkpoint next to it; delete it to train from the beginning"
        )
    return path


def check_may_be_missing(cfg, path):
    """Reject a checkpoint `path` that the user named and that does not exist; training would start from scratch.

    Args:
        cfg: settings of checkpoints; their default is checkpoint_last.pt in the directory of the run

    Raises:
        CheckpointError: the file is not the run's own last checkpoint
    """
    own = os.path.join(cfg.save_dir, os.path.basename(path))
    if os.path.abspath(path) == os.path.abspath(own) and os.path.basename(path).startswith("checkpoint_last"):
        return
    flag = "--restore-file" if cfg.restore_file != "checkpoint_last.pt" else "--continue-once"
    cure = f"give {own}" if os.path.isfile(own) else "correct the path"
    raise CheckpointError(f"{flag} {path}: no such file; {cure}, or omit it to train from the beginning")


def is_whole(path):
    """Return whether `path` has the end of a file of `torch.save`; of files of old torch only the size is checked."""
    try:
        with open(path, "rb") as opened:
            zipped = opened.read(4) == b"PK\x03\x04"
            return zipfile.is_zipfile(opened) if zipped else os.fstat(opened.fileno()).st_size > 0
    except OSError:
        return False


def numbered(path):
    """Return the checkpoints of epochs and updates next to checkpoint_lastSUFFIX.pt, newest first."""
    folder, name = os.path.split(path)
    suffix = re.escape(name[len("checkpoint_last") :])
    with contextlib.suppress(OSError):
        names = [n for n in os.listdir(folder or ".") if re.fullmatch(rf"checkpoint(\d+|_\d+_\d+){suffix}", n)]
        return sorted((os.path.join(folder, n) for n in names), key=os.path.getmtime, reverse=True)
    return []


def free_digit(cfg, value, suffix, default):
    """Return the last digit of the name of a best checkpoint, which no other checkpoint with `value` has.

    If all are used, it is `default`.
    """
    start = os.path.join(cfg.save_dir, f"checkpoint.best_{cfg.best_checkpoint_metric}_{value:.3f}")
    digits = range(cfg.keep_best_checkpoints)
    return next((digit for digit in digits if not os.path.exists(f"{start}{digit}{suffix}.pt")), default)


def same_metric(cfg, extra_state):
    """Return whether the best value in a checkpoint is of the run's metric; older checkpoints do not name theirs."""
    old, new = extra_state.get("best_metric", cfg.best_checkpoint_metric), cfg.best_checkpoint_metric
    if old != new:
        logger.warning(f"the best checkpoint so far is by {old}, not {new}: the next one replaces it")
    return old == new
