"""Child processes of a claim, which receive its signals and end before it."""

import signal
import subprocess

STOPS = (signal.SIGINT, signal.SIGTERM)


def call(command, cwd=None, capture=False):
    """Run *command* and return its exit status, output and errors; the latter two are empty without *capture*.

    Raises:
        SystemExit: a signal interrupted the command, so the captured output is incomplete
    """
    child, came = None, []

    def forward(number, _):
        came.append(number)
        if child:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOPS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"} if capture else {}
    try:
        child = subprocess.Popen(command, cwd=cwd, **pipes)
        for number in came:  # signals that arrived before the process existed
            child.send_signal(number)
        output, errors = child.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came and capture:
        raise SystemExit(128 + came[0])
    return child.returncode, output or "", errors or ""
