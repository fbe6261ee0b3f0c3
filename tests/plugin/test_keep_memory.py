"""Freed memory stays with a training process, and only with that."""

import subprocess
import sys

import pytest

from fairseq_deep.plugin.training import keep_memory

PROGRAM = """
import os, resource, torch
from fairseq_deep.plugin.training import keep_memory
def resident():  # MiB
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
print(faults())
keep_memory()
before = resident()
blocks = [torch.ones(2**22) for _ in range(32)]  # 512 MiB
last = torch.ones(1000)
del blocks
print(min(faults() for _ in range(5)))  # a small block inside a freed one may move the next one once
print(resident() - before, flush=True)
if not os.fork():
    os._exit(print(resident() - before, flush=True) or 0)
os.wait()
"""


def test_freed_memory_is_used_again_and_worker_processes_do_not_keep_it():
    if not keep_memory():
        pytest.skip("another C library, which is left alone")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    faults_without, faults, held, in_worker = map(float, done.stdout.split())
    assert faults < 100 < faults_without and held > 500 and in_worker < 20
