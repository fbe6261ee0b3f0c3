"""Builds the compiled kernels at their first use, stores them in the user's cache, and loads them.

The file name contains a hash of the inputs (source, processor, flags) and a hash of the content. The cache of another
machine or of an older version is therefore not used, and a damaged file is built again. Without a compiler, or with
``FAIRSEQ_DEEP_NATIVE=0``, decoding uses torch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fairseq_deep.errors import is_switched_off

from ..user_cache import user_cache

logger = logging.getLogger(__name__)
SOURCES = ("step.cpp", "attention.h", "layers.h", "products.h", "search.h", "stacks.h", "vectors.h")
SWITCH = "FAIRSEQ_DEEP_NATIVE"
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
SECONDS = 300  # time limit of the compiler


class Unavailable(Exception):
    """Raised if this machine cannot use kernels; the message has the reason."""


enabled = True
"""Whether :func:`load` returns kernels; set it to False to compare with torch's operations."""


def load() -> ctypes.CDLL | None:
    """Return the library of kernels; None if torch's operations are used instead (:func:`status` has the reason)."""
    return _load_once() if enabled else None


@functools.cache
def _load_once() -> ctypes.CDLL | None:
    try:
        return _load()
    except Unavailable as error:
        level = logging.INFO if error.args[1:] else logging.WARNING
        logger.log(level, f"decoding uses torch's operations: {error.args[0]}")
    return None


def status() -> str:
    """Return a readable line about the operations of decoding steps on this machine."""
    try:
        path = _find()
    except Unavailable as error:
        return f"torch's operations ({error.args[0]})"
    return f"compiled kernels, {' '.join(_machine_flags())}{'' if path else ', not built yet'}"


def _load() -> ctypes.CDLL:
    path = _find() or _build()
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise Unavailable(f"cannot load {path}: {error}") from error


def _find() -> str | None:
    """Return the path of the library if it is built and undamaged."""
    if is_switched_off(SWITCH):
        raise Unavailable(f"{SWITCH} is 0", "chosen")
    folder, key = user_cache("native"), _key()
    for path in glob.glob(os.path.join(glob.escape(folder), f"{key}-*.so")):
        try:
            if _is_own(path) and path.endswith(f"-{_digest(path)}.so"):
                return path
        except OSError:  # another process removed it, or it cannot be read
            continue
    return None


def _is_own(path: str) -> bool:
    """Return whether no other user can have written *path*: its code runs in this process."""
    return all(os.stat(each).st_uid == os.getuid() and not os.stat(each).st_mode & 0o022
               for each in (path, os.path.dirname(path)))  # fmt: skip


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


@functools.cache
def _processor() -> frozenset[str]:
    """Return the instruction sets that the processor reports (Linux)."""
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        line = ""
    return frozenset(line.partition(":")[2].split())


def _machine_flags() -> tuple[str, ...]:
    """Return compiler flags for the instruction sets that torch uses (``ATEN_CPU_CAPABILITY`` may restrict them).

    Raises:
        Unavailable: the kernels do not support this processor
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.system() != "Linux" or capability not in ("AVX2", "AVX512") or "avx2" not in _processor():
        raise Unavailable("the kernels require Linux and an x86 processor with AVX2", "unsupported")
    if capability == "AVX2" and "avx512f" in _processor():
        return ("-mavx2", "-mfma")
    return ("-march=native",)


def _key() -> str:
    """Return a hash of the inputs of the build."""
    parts = [*FLAGS, *_machine_flags(), *sorted(_processor())]
    try:
        parts += [Path(__file__).with_name(name).read_text() for name in SOURCES]
    except OSError as error:
        raise Unavailable(f"cannot read the source of the kernels: {error}") from error
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build() -> str:
    """Compile the library, and return its path.

    Raises:
        Unavailable: there is no compiler, it fails, or the cache cannot be written
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if not compiler:
        raise Unavailable("no C++ compiler was found; install one (g++) for faster decoding", "no compiler")
    folder = user_cache("native")
    logger.info("compiling the kernels of decoding steps, once for this machine")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = os.path.join(work, "step.so")
            source = str(Path(__file__).with_name(SOURCES[0]))
            command = [*compiler.split(), *FLAGS, *_machine_flags(), source, "-o", made]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
                raise Unavailable(f"{compiler} failed: {lines[0].strip()}")
            os.chmod(made, 0o700)
            path = os.path.join(folder, f"{_key()}-{_digest(made)}.so")
            os.replace(made, path)
        own = _is_own(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"cannot compile in {folder}: {error}") from error
    if not own:
        raise Unavailable(f"others can write to {folder}; restrict its permissions")
    return path
