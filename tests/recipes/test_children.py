"""Signals reach the child process of a comparison, also before it exists."""

import os
import signal
import subprocess

from fairseq_deep.recipes import children


def test_signals_reach_what_runs():
    """And the command ends as that does."""
    assert children.call(["bash", "-c", "trap 'exit 7' TERM; kill -TERM $PPID; sleep 5 & wait"]) == 7


def test_signals_that_come_before_its_start_reach_it(monkeypatch):
    before, popen = signal.getsignal(signal.SIGTERM), subprocess.Popen

    def slow(command):
        os.kill(os.getpid(), signal.SIGTERM)
        child = popen(command, stdout=subprocess.PIPE)
        child.stdout.readline()
        return child

    monkeypatch.setattr(children.subprocess, "Popen", slow)
    assert children.call(["bash", "-c", "trap 'exit 7' TERM; echo; sleep 5 & wait"]) == 7
    assert signal.getsignal(signal.SIGTERM) == before
