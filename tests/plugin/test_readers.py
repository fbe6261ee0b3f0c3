"""Threads that read ahead end before the interpreter does."""

import sys
import threading
import time

import pytest
from fairseq.data.iterators import BackgroundConsumer, BufferedIterator

from fairseq_deep.plugin.training.readers import stop_readers
from tests.helpers.commands import run


class Slow(list):
    """Batches that take a moment each."""

    def __iter__(self):
        for seconds in super().__iter__():
            time.sleep(seconds)
            yield seconds


def readers():
    return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]


@pytest.mark.parametrize("seconds, patience, left", [(0.0, 5.0, 0), (0.3, 0.1, 1)])
def test_a_reader_is_stopped_if_it_ends_in_time(seconds, patience, left):
    batches = BufferedIterator(2, Slow([seconds] * 1000))
    assert next(batches) == seconds and len(readers()) == 1
    stop_readers(patience)
    assert len(readers()) == left
    stop_readers()
    assert readers() == []


def test_the_interpreter_ends_without_readers():
    script = """
import atexit, threading
from fairseq.data.iterators import BackgroundConsumer, BufferedIterator
atexit.register(lambda: print([isinstance(thread, BackgroundConsumer) for thread in threading.enumerate()]))
import fairseq_deep
batches = BufferedIterator(2, list(range(100)))
print(next(batches), sum(isinstance(thread, BackgroundConsumer) for thread in threading.enumerate()))
"""
    assert run(sys.executable, "-c", script).stdout.splitlines() == ["0 1", "[False]"]
