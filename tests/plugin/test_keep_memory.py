"""Freed memory stays with a training process, and only with that."""

import subprocess
import sys

import pytest

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


def faults(first):
    done = subprocess.run([sys.executable, "-c", COUNT.format(first)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_is_used_again():
    from fairseq_deep.plugin.training import keep_memory

    if not keep_memory():
        pytest.skip("another C library, which is left alone")
    kept = faults("from fairseq_deep.plugin.training import keep_memory; keep_memory()")
    given_back = faults("import fairseq_deep.plugin.training")
    assert kept < 100 < given_back
