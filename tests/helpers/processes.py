"""Waiting for what other processes do."""

import subprocess
import time


def until(condition, seconds=300):
    """What *condition* returns once it is true, which must be in time."""
    end = time.time() + seconds
    while not (found := condition()):
        assert time.time() < end, f"not after {seconds} seconds"
        time.sleep(0.02)
    return found


def children(pid):
    """Numbers of the processes that the process has started."""
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()


def live(*pids):
    """Return the states of the processes *pids* that still run."""
    words = ["ps", "-o", "stat=", "-p", ",".join(map(str, pids))]
    states = subprocess.run(words, capture_output=True, text=True).stdout.split()
    return [state for state in states if not state.startswith("Z")]
