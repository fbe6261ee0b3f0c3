"""Child processes of a comparison, which receive its signals and end before it."""

from __future__ import annotations

import signal
import subprocess

STOPS = (signal.SIGINT, signal.SIGTERM)


def call(command: list[str]) -> int:
    """Run *command* and return its exit status."""
    child, came = None, []

    def forward(number, _):
        came.append(number)
        if child:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        child = subprocess.Popen(command)
        for number in came:  # signals that arrived before the process existed
            child.send_signal(number)
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
