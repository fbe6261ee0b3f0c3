"""One run at a time in a folder: the lock of an open file, which all processes that inherit the file hold together.

    python3 lock.py DESCRIPTOR FOLDER      # of the shell that calls it; it keeps the lock until it and its children end
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


def owner(folder):
    """Who holds the lock, in words."""
    try:
        with open(name(folder), encoding="utf-8") as stream:
            return stream.read().strip() or "another run"
    except OSError:
        return "another run"


def take(descriptor, folder, holder, patience=PATIENCE):
    """Lock the open file *descriptor*, ``name(folder)``, for the process *holder*; empty, or what to tell the user."""
    for second in range(patience + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if second == 0:
                print(f"waiting for {owner(folder)}, which still works in {folder}", flush=True)
            time.sleep(1)
        except OSError:
            break  # a file system without locks
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {holder} on {platform.node()}, since {since}\n".encode(), 0)
            break
    else:
        return f"{folder} is in use by {owner(folder)}: wait for its end, or use another --exp"
    return ""


def main():
    descriptor, folder = int(sys.argv[1]), sys.argv[2]
    problem = take(descriptor, folder, os.getppid(), int(os.environ.get("RECIPE_PATIENCE", PATIENCE)))
    if problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
