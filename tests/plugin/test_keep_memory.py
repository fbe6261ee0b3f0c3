"""Freed memory stays with a training process, and only with that."""

import subprocess
import sys

import pytest

KEEP = "from fairseq_deep.plugin.training import keep_memory; keep_memory()"
LEAVE = "import fairseq_deep.plugin.training"

COUNT = """
import resource, torch
{}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))  # a small block inside a freed one may move the next one once
"""

FORK = """
import os, torch
{}
def resident():  # MiB
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
before = resident()
blocks = [torch.ones(2**22) for _ in range(32)]  # 512 MiB
last = torch.ones(1000)
del blocks
held = resident() - before
child = os.fork()
if not child:
    print(resident() - before)
    os._exit(print(end="", flush=True) or 0)
os.waitpid(child, 0)
print(held)
"""


@pytest.fixture(scope="module", autouse=True)
def library():
    from fairseq_deep.plugin.training import keep_memory

    if not keep_memory():
        pytest.skip("another C library, which is left alone")


def figures(program, first):
    done = subprocess.run([sys.executable, "-c", program.format(first)], capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


def test_memory_is_used_again():
    [kept], [given_back] = figures(COUNT, KEEP), figures(COUNT, LEAVE)
    assert kept < 100 < given_back


def test_worker_processes_do_not_keep_freed_memory():
    child, held = figures(FORK, KEEP)
    assert held > 500 and child < 20
