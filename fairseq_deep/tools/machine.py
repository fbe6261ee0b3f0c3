"""Checks of `doctor` that require only torch: Python, processor, memory, disk, compiler."""

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# Linux's names; the first line is for x86, the second for ARM
INSTRUCTIONS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
CPUINFO = "/proc/cpuinfo"


@dataclass
class Check:
    """One row of the report; `state`: ok, warn (works with restrictions), no (not available, optional), FAIL."""

    name: str
    state: str
    value: str
    reason: str = ""
    cure: str = ""


def check_python() -> Iterator[Check]:
    """Report Python and the platform."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        yield Check("Python", "ok", f"{version} ({sys.executable})")
    else:
        cure = "create the environment with one of these"
        yield Check("Python", "warn", version, "tested only on 3.11 to 3.14", cure)
    yield Check("platform", "ok", platform.platform())


def check_cpu() -> Iterator[Check]:
    """Report the processor, its instructions for matrix products, its cores and torch's threads."""
    cores, threads = count_cores(), _count_threads()
    counts = f"{_count(cores, 'core')}, {_count(threads, 'thread')} in use" if threads else _count(cores, "core")
    model, instructions = describe_cpu()
    value = f"{model}, {counts}; {' '.join(instructions) or 'instructions unknown'}"
    if threads and threads > cores:
        reason = f"{threads} threads compete for {_count(cores, 'core')}"
        yield Check("CPU", "warn", value, reason, f"export OMP_NUM_THREADS={cores}")
    else:
        yield Check("CPU", "ok", value)


def check_space() -> Iterator[Check]:
    """Report memory and free disk space."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield Check("memory", "ok", f"{gib:.1f} GiB")
    free = shutil.disk_usage(".").free / 2**30
    if free < 2:
        reason = "a checkpoint of a 30-layer base model takes 1.6 GB, and a run keeps several"
        yield Check("free disk", "warn", f"{free:.1f} GiB", reason, "free disk space, or write to another disk")
    else:
        yield Check("free disk", "ok", f"{free:.1f} GiB in {os.getcwd()}")


def check_compiler() -> Iterator[Check]:
    """Look for a C++ compiler."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler:
        yield Check("compiler", "ok", compiler)
    else:
        cure = "apt-get install g++ (Debian), xcode-select --install (macOS)"
        yield Check("compiler", "no", "none found", "fairseq's extensions cannot be built", cure)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_cpu() -> tuple[str, list[str]]:
    """Return the processor's name and its subset of `INSTRUCTIONS` (empty if the system does not report it)."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    present = set(fields.get("flags", fields.get("Features", "")).split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, [instruction for instruction in INSTRUCTIONS if instruction in present]


def _count_threads() -> int:
    """Return the number of torch's threads; 0 without torch."""
    try:
        import torch
    except Exception:
        return 0
    return torch.get_num_threads()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
