"""Threads that read ahead end before the interpreter does."""

import subprocess
import sys
import threading
import time

import pytest
from fairseq.data.iterators import BackgroundConsumer, BufferedIterator

from fairseq_deep.plugin.training.readers import stop_readers


class Slow:
    """Batches that take a moment each."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1000

    def __iter__(self):
        for number in range(1000):
            time.sleep(self.seconds)
            yield number


def readers():
    return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]


@pytest.mark.parametrize("seconds, patience, left", [(0.0, 5.0, 0), (0.2, 5.0, 0), (1.0, 0.2, 1)])
def test_a_reader_that_waits_or_reads_is_stopped_if_it_ends_in_time(seconds, patience, left):
    batches = BufferedIterator(2, Slow(seconds))
    assert next(batches) == 0 and len(readers()) == 1
    stop_readers(patience)
    assert len(readers()) == left
    stop_readers()
    assert readers() == []


def test_the_interpreter_ends_without_readers():
    script = """
import atexit, sys, threading
from fairseq.data.iterators import BackgroundConsumer, BufferedIterator
atexit.register(lambda: print([isinstance(thread, BackgroundConsumer) for thread in threading.enumerate()]))
import fairseq_deep
batches = BufferedIterator(2, list(range(100)))
print(next(batches), sum(isinstance(thread, BackgroundConsumer) for thread in threading.enumerate()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["0 1", "[False]"]
