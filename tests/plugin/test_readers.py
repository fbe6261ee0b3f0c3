"""Threads that read ahead end before the interpreter does, and an epoch goes on with other numbers of processes."""

import pytest
import torch
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator
from torch.utils.data import TensorDataset

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


@pytest.mark.parametrize("before, steps, after, again", [(1, 4, 2, []), (2, 2, 1, []), (3, 1, 2, [2])])
def test_an_epoch_goes_on_with_another_number_of_processes(before, steps, after, again):
    """No batch is left out; one is read again only if it would leave a step incomplete."""
    data, batches = TensorDataset(torch.arange(12)), [[index] for index in range(12)]

    def start(count):
        places = ({"num_shards": count, "shard_id": rank} for rank in range(count))
        return [EpochBatchIterator(data, lambda batch: int(batch[0][0]), batches, **place) for place in places]

    first, second = start(before), start(after)
    done = [next(each) for each in [each.next_epoch_itr(shuffle=False) for each in first] for _ in range(steps)]
    for each in second:
        each.load_state_dict(first[0].state_dict())
    rest = [batch for each in second for batch in each.next_epoch_itr(shuffle=False)]
    assert sorted(done + rest) == sorted([*range(12), *again])


@pytest.mark.parametrize("skips, last", [(False, [7]), (True, [])])
def test_an_epoch_ends_with_its_last_batch_where_it_resumed_within_a_step(skips, last):
    batches = CountingIterator(range(8)).skip(3)
    assert [*GroupedIterator(batches, 4, skips)] == [[3, 4, 5, 6], *[last] * bool(last)] and not batches.has_next()
