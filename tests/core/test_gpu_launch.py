"""Triton's kernels become machine code for GPUs, and their functions start them with matching arguments.

A driver without a GPU loads and starts nothing. The kernels' values are tested by Triton's interpreter
(``test_gpu_kernels.py``), which does not compile them.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from fairseq_deep.core.gpu import kernels

started = []


def launcher(source, metadata):
    return lambda *args: started.append(source.fn.__name__)


def use(capability):
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 48 * 1024},
                            load_binary=lambda *args: (0, 0, 0, 0, 1024))
    driver = SimpleNamespace(utils=utils, launcher_cls=launcher, get_current_device=lambda: capability,
                             get_current_stream=lambda device: 0,
                             get_current_target=lambda: GPUTarget("cuda", capability, 32))
    triton.runtime.driver.set_active(driver)


for capability, dtype in ((75, torch.float16), (80, torch.bfloat16), (90, torch.float32), (90, torch.float64)):
    use(capability)
    wide = torch.promote_types(dtype, torch.float32)
    x, rows = torch.zeros(2, 3, 512, dtype=dtype), torch.zeros(4, 2 * 3 * 512, dtype=dtype)
    norm, weights = torch.zeros(512, dtype=dtype), torch.zeros(4, dtype=wide)
    gates = torch.zeros(2, 3, 3 * 512, dtype=dtype), *torch.zeros(2, 3, 512, dtype=dtype), x, x
    kernels.append_row(x, rows, weights, 1, 0)
    kernels.append_normed(x, norm, norm, 1e-5, rows, weights, 1, 0)
    kernels.pull_normed(x, x, norm, 1e-5, rows, weights, 1, 0)
    kernels.cell_forward(*gates, 1e-5)
    kernels.cell_backward(*gates, x, x, 1e-5)
    print(*started)
    started.clear()
"""


def test_kernels_are_compiled_and_started(tmp_path):
    """fp16 for a T4, bf16 for an A100, fp32 and fp64 for an H100."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["_append_row _append_normed _pull_normed _cell_forward _cell_backward"] * 4
