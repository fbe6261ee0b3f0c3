"""The processor: its name, cores and instructions."""

import contextlib
import os
import platform

# Linux's names; the first line is for x86, the second for ARM
INSTRUCTIONS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
CPUINFO = "/proc/cpuinfo"


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
