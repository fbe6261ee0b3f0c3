"""Memory of a training step on a CPU: the C library keeps it for the next step.

glibc gives large blocks back to the system when they are freed, and requests them again a moment later. The system
fills them with zeros, page by page. In training, where each step needs the same again, that was a tenth of all time.
"""

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of <malloc.h>
MOST = 2**31 - 1


@functools.cache
def keep_memory() -> bool:
    """Let freed memory stay with this process from now on. Tell whether the C library knows how; no other is asked."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(M_MMAP_MAX, 0)) and bool(library.mallopt(M_TRIM_THRESHOLD, MOST))
