"""Threads that read ahead end before the interpreter does."""

from tests.helpers.commands import run

SCRIPT = """
import atexit, threading, time
from fairseq.data.iterators import BackgroundConsumer, BufferedIterator
class Slow(list):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.3)
            yield batch
def reading():
    return sum(isinstance(thread, BackgroundConsumer) for thread in threading.enumerate())
atexit.register(lambda: print(reading()))
from fairseq_deep.plugin.training import readers
slow = BufferedIterator(2, Slow(range(1000)))
next(slow)
print(reading())
readers.stop_readers(0.1)
print(reading())
fast = BufferedIterator(2, list(range(1000)))  # its queue is full when the program ends
next(fast)
time.sleep(0.5)
"""


def test_the_interpreter_ends_without_readers_but_does_not_wait_for_ever():
    assert run("python3", "-c", SCRIPT).stdout.split() == ["1", "1", "0"]
