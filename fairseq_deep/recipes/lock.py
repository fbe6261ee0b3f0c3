"""Locks that allow one run at a time in a directory; processes that inherit the locked file also hold the lock."""

from __future__ import annotations

import os
import platform
import time

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import flock

PATIENCE = 30
"""Time limit for another run to end, in seconds; ``RECIPE_PATIENCE`` overrides it."""


def take(path: str, folder: str) -> int:
    """Lock the file *path* for this process, and return its descriptor.

    Raises:
        UsageError: another run works in *folder*
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.set_inheritable(descriptor, True)
    patience = int(os.environ.get("RECIPE_PATIENCE", PATIENCE))
    for second in range(patience + 1):
        try:
            flock(descriptor)
        except BlockingIOError:
            if second == 0:
                print(f"waiting for {owner(path)}, which still uses {folder}", flush=True)
            time.sleep(1 if patience else 0)
        except OSError:
            return descriptor  # locks are not supported
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode(), 0)
            return descriptor
    raise UsageError(f"{folder} is in use by {owner(path)}: try again later, or use another --exp")


def owner(path: str) -> str:
    """Describe the run that holds the lock."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip() or "another run"
    except OSError:
        return "another run"
