"""Commands that a claim starts: they get the signals that end the claim, and it ends after them."""

import signal
import subprocess

STOPS = (signal.SIGINT, signal.SIGTERM)


def call(command, cwd=None, capture=False):
    """Exit status, output and errors of *command*; the latter two are empty unless it was to *capture* them.

    Raises:
        SystemExit: a signal came while output was captured, so that there is no whole output
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
        for number in came:  # while the process was being made
            child.send_signal(number)
        output, errors = child.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came and capture:
        raise SystemExit(128 + came[0])
    return child.returncode, output or "", errors or ""
