"""report versions and check which features work on this machine

Exit code 0: translation models can be trained on this machine; 1: they cannot.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq_deep.errors import one_line
from fairseq_deep.tools import allocator
from fairseq_deep.tools.machine import count_cores, describe_cpu
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep doctor --verbose"
SET_UP = "pip install -r requirements.txt"
OUR_BUILD = f"{SET_UP} (brings fairseq 0.12.2+deep9)"
BF16_CAPABILITY = 8  # major compute capability of the first GPUs with bf16; older ones emulate it
OTHER_BUILDS = (
    "other builds reject their own checkpoints with torch 2.6 or newer, or run code in them; they may interpret --bf16 "
    "as a request for a TPU, need numpy 1, and drop the last batch if its size is not a multiple of 8 (which "
    "--required-batch-size-multiple 1 prevents)"
)
EXTENSIONS = ("fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast", "fairseq.libbleu")
PACKAGES = ("sacrebleu", "subword-nmt", "sacremoses", "safetensors")


class Check(NamedTuple):
    """One row of the report; `state`: ok, warn (works with restrictions), no (not available, optional), FAIL."""

    name: str
    state: str
    value: str
    reason: str = ""
    cure: str = ""


class Problem(Exception):
    """The end of a check that is not "ok"; its arguments are those of `Check`, from the state on."""


class Row(NamedTuple):
    """A check: `test` gets the modules of `needs` and returns the value; the row is omitted without them or a value."""

    name: str
    test: Callable[..., str]
    needs: tuple[str, ...] = ()

    def run(self) -> Check | None:
        """Return the result; an exception in a check becomes a warning."""
        modules = [_try_import(module)[0] for module in self.needs]
        if None in modules:
            return None
        try:
            value = self.test(*modules)
        except Problem as problem:
            return Check(self.name, *problem.args)
        except Exception as error:
            return Check(self.name, "warn", "cannot be checked", _described(error), SET_UP)
        return Check(self.name, "ok", value) if value else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the form of the report."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--verbose", action="store_true", help="also list this package's changes to fairseq")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if translation models can be trained on this machine, otherwise 1."""
    checks = [check for row in ROWS if (check := row.run())]
    failed = [check.name for check in checks if check.state == "FAIL"]
    patches = _patches()
    if args.json:
        report = {"training_works": not failed, "checks": [check._asdict() for check in checks], "patches": patches}
        print(json.dumps(report, indent=2))
        return 1 if failed else 0
    print(format_table([check[:3] for check in checks]))
    for check in checks:
        if check.reason:
            print(f"\n{check.name}: {check.reason}" + (f"\n  fix: {check.cure}" if check.cure else ""))
    if patches and args.verbose:
        print("\nChanges to fairseq and torch at import, with reasons:")
        print(format_table([(each["name"], each["reason"]) for each in patches], indent="  "))
    print("\n" + (f"Training does not work here: {', '.join(failed)}." if failed else "Training works here."))
    if failed and not _try_import("fairseq_deep.runtime.translator")[1]:
        print("Packaged models can be translated here.")
    return 1 if failed else 0


def _patches() -> list[dict[str, str]]:
    """Return the plugin's patches of fairseq, with reasons; empty without fairseq."""
    with contextlib.suppress(Exception):
        from fairseq_deep.plugin.patches import OTHERS, PATCHES

        found = {f"{patch.where}.{patch.name}".replace(":", "."): patch.reason for patch in PATCHES}
        return [{"name": name, "reason": reason} for name, reason in {**found, **OTHERS}.items()]
    return []


def _try_import(name: str) -> tuple[Any, str]:
    """Return a module and "", or None and the reason why it cannot be imported; its output is discarded."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            logging.getLogger("fairseq").setLevel(logging.ERROR)
            return importlib.import_module(name), ""
    except Exception as error:
        return None, _described(error)


def _imported(name: str) -> Any:
    """Return a module that training requires."""
    module, error = _try_import(name)
    if error:
        raise Problem("FAIL", "cannot be imported", error, SET_UP)
    return module


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _python() -> str:
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise Problem("warn", version, "tested only on 3.11 to 3.14", "create the environment with one of these")
    return f"{version} ({sys.executable})"


def _cpu() -> str:
    """The processor, its instructions for matrix products, its cores and torch's threads."""
    torch, _ = _try_import("torch")
    cores, threads = count_cores(), torch.get_num_threads() if torch else 0
    counts = _count(cores, "core") + (f", {_count(threads, 'thread')} in use" if threads else "")
    model, instructions = describe_cpu()
    value = f"{model}, {counts}; {' '.join(instructions) or 'instructions unknown'}"
    if threads > cores:
        reason = f"{threads} threads compete for {_count(cores, 'core')}"
        raise Problem("warn", value, reason, f"export OMP_NUM_THREADS={cores}")
    return value


def _disk() -> str:
    free = shutil.disk_usage(".").free / 2**30
    if free < 2:
        reason = "a checkpoint of a 30-layer base model takes 1.6 GB, and a run keeps several"
        raise Problem("warn", f"{free:.1f} GiB", reason, "free disk space, or write to another disk")
    return f"{free:.1f} GiB in {os.getcwd()}"


def _torch() -> str:
    torch = _imported("torch")
    return f"{torch.__version__} ({_count(torch.get_num_threads(), 'thread')})"


def _gpu(torch: Any) -> str:
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() * torch.cuda.is_available()))
    found = [f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {'no ' * (device.major < BF16_CAPABILITY)}bf16"
             for device in devices]  # fmt: skip
    if found:
        return "; ".join(found)
    cuda, driver = torch.version.cuda, shutil.which("nvidia-smi")
    if cuda and driver:
        reason = f"torch is built for CUDA {cuda} but sees no device"
        raise Problem("no", "none usable", reason, "check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES")
    if driver:
        cure = "install the CUDA build of torch for this driver (see pytorch.org)"
        raise Problem("no", "not usable", "this machine has an NVIDIA driver, but torch is a CPU build", cure)
    raise Problem("no", "none (a GPU would need NVIDIA's driver)" if cuda else "none (CPU build of torch)")


def _allocator() -> str:
    torch, _ = _try_import("torch")
    if not sys.platform.startswith("linux") or torch and torch.cuda.is_available():
        return ""
    name = allocator.find()
    if not name:
        reason = "with tcmalloc, recipes train on a CPU 1.05 to 1.4 times as fast"
        cure = "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu)"
        raise Problem("no", "the C library's", reason, cure)
    return f"{name} (recipes use it to train on a CPU)"


def _fairseq() -> str:
    fairseq, reason = _try_import("fairseq")
    if reason:
        if "No module named 'fairseq'" in reason:
            reason = "it is not installed; training requires it, translating packaged models does not"
        raise Problem("FAIL", "cannot be imported", reason, OUR_BUILD)
    try:
        version = importlib.metadata.version("fairseq")
    except importlib.metadata.PackageNotFoundError:
        version = fairseq.__version__
    if _try_import("fairseq.safe_load")[1]:
        raise Problem("warn", f"{version}, not our build", OTHER_BUILDS, OUR_BUILD)
    return f"{version}, our build ({os.path.dirname(fairseq.__file__)})"


def _extensions(fairseq: Any) -> str:
    errors = {name.rpartition(".")[2]: _try_import(name)[1] for name in EXTENSIONS}
    broken = [name for name, error in errors.items() if error]
    if broken:
        reason = "; ".join(filter(None, errors.values()))
        raise Problem("FAIL", f"missing: {', '.join(broken)}", reason, f"a C++ compiler, {SET_UP}")
    return ", ".join(errors)


def _user_dir() -> str:
    """Import the package through ``--user-dir`` in a new process, like fairseq-train."""
    import fairseq_deep

    folder = os.path.abspath(fairseq_deep.__path__[0])
    program = (
        "import argparse, sys; from fairseq import utils; from fairseq.models import ARCH_MODEL_NAME_REGISTRY as names;"
        "utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]));"
        "print('registered', sum(arch in names for arch in sys.modules['fairseq_deep'].list_archs()))"
    )
    result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=300)
    words = (result.stdout.strip().splitlines() or [""])[-1].split()
    if result.returncode or words[:1] != ["registered"] or words[1] == "0":
        reason = (result.stderr.strip().splitlines() or ["no architecture was registered"])[-1]
        raise Problem("FAIL", "cannot be imported", reason, SET_UP)
    return f"{words[1]} architectures ({folder})"


def _plugins() -> str:
    """Plugins with methods."""
    from fairseq_deep.core.registry import PLUGINS

    errors = {name: error for name, error in PLUGINS.items() if error}
    if errors:
        reason = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise Problem("FAIL", f"cannot be imported: {', '.join(errors)}", reason, "correct or uninstall it")
    return ", ".join(PLUGINS)


def _console_scripts() -> str:
    script, folder = shutil.which("fairseq-train"), os.path.dirname(sys.executable)
    cure = f"export PATH={folder}:$PATH"
    if script is None:
        raise Problem("warn", "not on PATH", "the environment is not active", cure)
    if os.path.realpath(os.path.dirname(script)) != os.path.realpath(folder):
        raise Problem("warn", script, f"it belongs to another environment than {sys.executable}", cure)
    return script


ROWS = (
    Row("Python", _python),
    Row("platform", platform.platform),
    Row("CPU", _cpu),
    Row("free disk", _disk),
    Row("torch", _torch),
    Row("GPU", _gpu, ("torch",)),
    Row("allocator", _allocator),
    Row("numpy", lambda: _imported("numpy").__version__),
    Row("fairseq", _fairseq),
    Row("extensions", _extensions, ("fairseq",)),
    Row("--user-dir", _user_dir),
    Row("plugins", _plugins),
    Row("fairseq-train", _console_scripts),
    Row("decoding", lambda machine: machine.describe(), ("fairseq_deep.core.decoding.machine",)),
    *(Row(name, functools.partial(importlib.metadata.version, name)) for name in PACKAGES),
)
"""The report, row by row."""
