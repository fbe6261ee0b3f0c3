"""One run at a time in a folder: the lock of an open file, which all processes that inherit the file hold together.

    python3 lock.py DESCRIPTOR FOLDER FILE    # of the shell that calls it, which keeps it until it and its children end
"""

import fcntl
import os
import platform
import sys
import time

PATIENCE = 30
"""Seconds that a run which is ending may take."""


def name(folder):
    return os.path.join(folder, ".lock")


def owner(path):
    """Who holds the lock, in words."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip() or "another run"
    except OSError:
        return "another run"


def take(descriptor, folder, holder, patience=PATIENCE, path=None):
    """Lock the open file *descriptor*, *path*, for the process *holder*; empty, or what to tell the user.

    Args:
        path: ``name(folder)`` if there is none
    """
    path = path or name(folder)
    for second in range(patience + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if second == 0:
                print(f"waiting for {owner(path)}, which still works in {folder}", flush=True)
            time.sleep(1)
        except OSError:
            break  # a file system without locks
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {holder} on {platform.node()}, since {since}\n".encode(), 0)
            break
    else:
        return f"{folder} is in use by {owner(path)}: wait for its end, or use another --exp"
    return ""


def main():
    descriptor, folder, path = sys.argv[1:]
    problem = take(int(descriptor), folder, os.getppid(), int(os.environ.get("RECIPE_PATIENCE", PATIENCE)), path)
    if problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
