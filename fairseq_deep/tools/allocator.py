"""The memory allocator of trainings on a CPU: gperftools' tcmalloc, if it is installed.

Batches have tensors of many sizes. With glibc's allocator the memory of a long training falls into gaps: the process
grows, and its steps become slower (see ``benchmarks/results/training.md``). Results are equal.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import sys
from collections.abc import Iterator

LIBRARY = "tcmalloc_minimal"


def find() -> str:
    """Return the name of the installed library; empty if there is none. Only Linux is supported."""
    return ctypes.util.find_library(LIBRARY) or "" if sys.platform.startswith("linux") else ""


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Start programs with tcmalloc; ``LD_PRELOAD`` of the user has precedence, also if it is empty."""
    name = "" if "LD_PRELOAD" in os.environ else find()
    if name:
        print(f"  memory allocator: {name}", flush=True)
        os.environ["LD_PRELOAD"] = name
    try:
        yield
    finally:
        if name:
            del os.environ["LD_PRELOAD"]
