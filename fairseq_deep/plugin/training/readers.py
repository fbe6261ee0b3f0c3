"""Stops fairseq's prefetching threads before the interpreter exits.

A run that ends within an epoch leaves such a thread reading. The interpreter unwinds the thread at its current
instruction. Inside torch's C++ code, this aborts the process ("terminate called without an active exception"). All
checkpoints are saved by then, but the exit status reports a failure.
"""

import contextlib
import queue
import threading
import time

from fairseq.data.iterators import BackgroundConsumer

PATIENCE = 5.0
"""Time limit for all threads together, in seconds; a thread blocked by a dead worker is abandoned."""


def stop_readers(patience: float = PATIENCE) -> None:
    """Stop each thread after its current batch."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]
    end = time.monotonic() + patience
    for thread in threads:
        thread._max_len = 0
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):  # the thread may be blocked by a full queue
                thread._queue.get(timeout=0.05)
