"""The memory allocator of trainings on a CPU: gperftools' tcmalloc, if it is installed.

Batches have tensors of many sizes. With glibc's allocator the memory of a long training falls into gaps: the process
grows, and its steps become slower (see ``benchmarks/results/training.md``). Results are equal.
"""

from __future__ import annotations

import ctypes.util
import os
import sys

LIBRARY = "tcmalloc_minimal"


def find() -> str:
    """Return the name of the installed library; empty if there is none. Only Linux is supported."""
    return ctypes.util.find_library(LIBRARY) or "" if sys.platform.startswith("linux") else ""


def environment() -> dict[str, str]:
    """Return the variables that start programs with tcmalloc; ``LD_PRELOAD`` of the user has precedence, also empty."""
    name = "" if "LD_PRELOAD" in os.environ else find()
    return {"LD_PRELOAD": name} if name else {}
