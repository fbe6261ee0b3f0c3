"""fairseq's threads that read batches ahead end before the interpreter does.

A training that ends within an epoch leaves such a thread reading. The interpreter unwinds it where it stands, and if
that is in torch's C++, the process aborts ("terminate called without an active exception") after all has been saved:
its exit status then says that the training failed.
"""

import contextlib
import queue
import threading
import time

from fairseq.data.iterators import BackgroundConsumer

PATIENCE = 5.0
"""Seconds for all of them together; one that waits for a worker that is gone is left to itself."""


def stop_readers(patience: float = PATIENCE) -> None:
    """End the threads after the batch that they are reading."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]
    end = time.monotonic() + patience
    for thread in threads:
        thread._max_len = 0
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):  # it may wait for room
                thread._queue.get(timeout=0.05)
