"""The memory allocator of trainings on a CPU."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fairseq_deep.recipes import steps
from fairseq_deep.tools import allocator, doctor

NAME = "libtcmalloc_minimal.so.4"


def started(ngpu=0, dry=False):
    """LD_PRELOAD of a training that the recipe starts, and what it prints."""
    found, said = [], []

    async def run(*_, environment, **__):
        found.append(environment.get("LD_PRELOAD"))

    place, options = SimpleNamespace(nnodes=1), SimpleNamespace(ngpu=ngpu)
    plan = SimpleNamespace(place=place, processes=1, options=options, train_command=["fairseq-train"])
    asyncio.run(steps.start_training(SimpleNamespace(plan=plan, dry=dry, run=run, say=said.append), object()))
    return found[0], said


def test_a_training_on_the_cpu_of_a_linux_machine_gets_it(monkeypatch):
    libraries = {"tcmalloc_minimal": NAME}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes.util, "find_library", libraries.get)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert started() == (NAME, [f"  memory allocator: {NAME}"])
    assert started(ngpu=1) == started(dry=True) == (None, [])
    for own in ("mine.so", ""):
        monkeypatch.setenv("LD_PRELOAD", own)
        assert started() == (None, [])
    monkeypatch.delenv("LD_PRELOAD")
    libraries.clear()
    check = doctor.Row("allocator", doctor._allocator).run()
    assert check.state == "no" and "libtcmalloc-minimal4" in check.cure and started() == (None, [])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor._allocator() == "" and started() == (None, [])


@pytest.mark.skipif(not allocator.find(), reason="tcmalloc is not installed")
def test_a_program_uses_it(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    words, environment = [sys.executable, "-c", "print(open('/proc/self/maps').read())"], allocator.environment()
    maps = subprocess.run(words, capture_output=True, env={**os.environ, **environment})
    assert allocator.find().encode() in maps.stdout and not maps.stderr
