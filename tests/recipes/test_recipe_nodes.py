"""Several machines: why a training by torchrun has ended."""

import os

import pytest

from fairseq_deep.recipes import nodes

SUMMARY = """
fairseq_deep: --lr 5 is too much
E1123 01:22:24.113000 24249 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  host      : localhost
  rank      : 2 (local_rank: 0)
  exitcode  : {other} (pid: 24277)
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  exitcode  : {root} (pid: 24278)  (SIGKILL)
============================================================
"""


@pytest.mark.parametrize("root, other, said", [
    (1, 1, "fairseq_deep: --lr 5 is too much"), (-11, 1, "process 3 on HOST was ended by SIGSEGV"),
    (-9, -15, "process 3 on HOST was ended by SIGKILL (out of memory?)"), (75, 75, ""), (75, -15, ""),
    (1, -9, "process 2 on HOST was ended by SIGKILL (out of memory?)"),
    (-6, -15, "fairseq_deep: --lr 5 is too much"),  # NCCL aborts after the loss of another process
])  # fmt: skip
def test_what_torchrun_says_is_one_line(root, other, said):
    assert nodes.explain(SUMMARY.format(root=root, other=other)) == said.replace("HOST", os.uname().nodename)


def test_a_port_in_use_is_named():
    line = "torch.distributed.DistNetworkError: The server socket has failed to listen: port 29500, EADDRINUSE"
    assert nodes.explain(f"Traceback (most recent call last):\n  File x\n    store = x\n{line}\n") == line
