"""fairseq-deep doctor: what it reports here, and on machines that are put together for it."""

import functools
import importlib
import json
import sys
import types

import fairseq
import pytest
import torch

import fairseq_deep
from fairseq_deep import list_archs
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin import patches
from fairseq_deep.plugin.patches import OTHERS, PATCHES
from fairseq_deep.tools import doctor, machine
from fairseq_deep.tools.doctor import Problem, Row


def check_of(name):
    """The row of that name; None if it is omitted."""
    return next(row for row in doctor.ROWS if row.name == name).run()


def test_the_report_of_this_environment(command):
    code, out, _ = command("doctor", "--json")
    report = json.loads(out)
    checks = {check["name"]: check for check in report["checks"]}
    assert code == 0 and report["training_works"], [c for c in report["checks"] if c["state"] == "FAIL"]
    expected = {"Python", "platform", "CPU", "free disk", "torch", "numpy", "fairseq", "extensions"}
    expected |= {"GPU", "--user-dir", "fairseq-train", "decoding", "sacrebleu", "subword-nmt", "sacremoses"}
    assert expected <= checks.keys() and len(report["patches"]) == len(PATCHES) + len(OTHERS)
    assert torch.__version__ in checks["torch"]["value"]
    assert int(checks["--user-dir"]["value"].split()[0]) == len(list_archs())  # as `archs` counts
    assert all(check["state"] in ("ok", "warn", "no", "FAIL") for check in report["checks"])
    assert all(check["reason"] for check in report["checks"] if check["state"] in ("warn", "FAIL"))


def raising(error):
    def test():
        raise error

    return test


def test_the_table_gives_reasons_and_fixes_then_the_verdict(monkeypatch, command):
    """A row without a value, or without its module, is left out; a check that breaks is a warning."""
    odd = raising(OSError("no such thing"))
    rows = Row("one", lambda: "fine"), Row("none", lambda: ""), Row("other", odd, ("no.module",)), Row("last", odd)
    rows += (Row("second", raising(Problem("FAIL", "broken", "because", "do this"))),)
    monkeypatch.setattr(doctor, "ROWS", rows)
    assert command("doctor")[:2] == (1, (
        "one     ok    fine\nlast    warn  cannot be checked\nsecond  FAIL  broken\n\n"
        f"last: OSError: no such thing\n  fix: {doctor.SET_UP}\n\n"
        "second: because\n  fix: do this\n\n"
        "Training does not work here: second.\nPackaged models can be translated here.\n"
    ))  # fmt: skip


def test_patches_of_fairseq_are_listed(monkeypatch, command):
    monkeypatch.setattr(doctor, "ROWS", ())
    assert command("doctor")[:2] == (0, "\n\nTraining works here.\n")
    heading, *table = command("doctor", "--verbose")[1].strip().partition("\n\n")[0].splitlines()
    assert heading == "Changes to fairseq and torch at import, with reasons:"
    known = {**{f"{each.where}.{each.name}".replace(":", "."): each.reason for each in PATCHES}, **OTHERS}
    assert [tuple(line.split(maxsplit=1)) for line in table] == [*known.items()]


def test_errors_are_one_line_with_another_fairseq(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
    monkeypatch.setitem(sys.modules, "fairseq.safe_exit", None)
    monkeypatch.delattr(fairseq, "safe_exit", raising=False)
    patches.report_on_one_line()
    for error in (UsageError("--a: problem; fix"), ValueError("b")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "fairseq_deep: --a: problem; fix\na traceback\n"


@pytest.mark.parametrize("missing, message, name, state, words, omitted", [
    ("torch", "no torch today", "torch", "FAIL", [doctor.SET_UP, "no torch today"], ["GPU"]),
    ("numpy", "no numpy today", "numpy", "FAIL", ["no numpy today"], []),
    ("fairseq", "mutable default <class 'X'> for field common is not allowed", "fairseq", "FAIL", ["0.12.2+deep9"],
     ["extensions"]),
    ("fairseq.libbleu", "no libbleu", "extensions", "FAIL", ["missing: libbleu"], []),
    ("fairseq.safe_load", "there is none", "fairseq", "warn",
     ["not our build", "run code", "--required-batch-size-multiple 1", doctor.OUR_BUILD], []),
])  # fmt: skip
def test_what_cannot_be_imported(missing, message, name, state, words, omitted, monkeypatch):
    """Checks that need it are left out."""
    real = importlib.import_module

    def fake(name, package=None):
        if name == missing or name.startswith(missing + "."):
            raise ImportError(message)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fake)
    check = check_of(name)
    told = f"{check.value} {check.reason} {check.cure}"
    assert check.state == state and all(word in told for word in words), told
    assert [row.name for row in doctor.ROWS if missing in row.needs and row.run() is None] == omitted


def test_a_plugin_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "broken_plugin").mkdir()
    (tmp_path / "broken_plugin/__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.setattr(fairseq_deep, "__path__", [str(tmp_path / "broken_plugin")])
    check = check_of("--user-dir")
    assert (check.name, check.state) == ("--user-dir", "FAIL") and "broken on purpose" in check.reason


def gpu(major):
    """One GPU of this compute capability."""
    device = types.SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=major)
    return {"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_properties": lambda index: device}  # fmt: skip


def cpu(cuda=None, driver=None):
    """No GPU, with the builds of torch for *cuda*, and a driver or none."""
    return {"torch.cuda.is_available": lambda: False, "torch.version.cuda": cuda, "shutil.which": lambda name: driver}


MACHINES = [  # what is put in the place of what, name, state and parts of value, reason and fix
    ({"sys.version_info": (3, 10, 18)}, "Python", "warn", ["3.11 to 3.14"]),
    ({"sys.version_info": (3, 14, 0)}, "Python", "ok", []),
    ({"shutil.which": lambda name: None}, "fairseq-train", "warn", ["not on PATH", "export PATH="]),
    ({"shutil.which": lambda name: f"/odd/{name}"}, "fairseq-train", "warn", ["another environment"]),
    (gpu(7), "GPU", "ok", ["Test GPU, 80 GiB, no bf16"]),
    (gpu(8), "GPU", "ok", ["Test GPU, 80 GiB, bf16"]),
    (cpu(cuda="12.4", driver="/usr/bin/nvidia-smi"), "GPU", "no", ["sees no device", "CUDA_VISIBLE"]),
    (cpu(cuda="12.4"), "GPU", "no", ["none (a GPU would need NVIDIA's driver)"]),
    (cpu(driver="/usr/bin/nvidia-smi"), "GPU", "no", ["CPU build", "pytorch.org"]),
    (cpu(), "GPU", "no", ["none (CPU build of torch)"]),
    ({"fairseq_deep.tools.doctor.count_cores": lambda: 1, "torch.get_num_threads": lambda: 4}, "CPU", "warn",
     ["1 core, 4 threads in use", "export OMP_NUM_THREADS=1"]),
    ({"shutil.disk_usage": lambda path: types.SimpleNamespace(free=2**30)}, "free disk", "warn", []),
    ({"fairseq_deep.tools.doctor.ROWS": [Row("x", functools.partial(importlib.metadata.version, "x-y"))]}, "x", "warn",
     ["No package metadata was found for x-y"]),
    ({"fairseq_deep.core.registry.PLUGINS": {"mine": "", "bad": "no torch"}}, "plugins", "FAIL", ["bad: no torch"]),
    ({"fairseq_deep.core.registry.PLUGINS": {"mine": "", "other": ""}}, "plugins", "ok", ["mine, other"]),
]  # fmt: skip


@pytest.mark.parametrize("fakes, name, state, parts", [
    pytest.param(*row, id=f"{row[1]} {row[2]} {' '.join(row[3])[:40]}") for row in MACHINES
])  # fmt: skip
def test_other_machines(monkeypatch, fakes, name, state, parts):
    for place, value in fakes.items():
        monkeypatch.setattr(place, value)
    check = check_of(name)
    told = f"{check.value} {check.reason} {check.cure}"
    assert check.state == state and all(part in told for part in parts), told
    assert bool(check.reason) == bool(check.cure)


CPUINFO = "model name\t: A Xeon\nflags\t\t: fpu avx2 fma amx_int8\n\nmodel name\t: another\nflags\t\t: avx2\n"


@pytest.mark.parametrize("text, told", [(CPUINFO, "A Xeon, 2 cores{}; avx2 fma amx_int8"),
                                        (None, "a name, 2 cores{}; instructions unknown")])  # fmt: skip
def test_the_processor_and_its_instructions(monkeypatch, tmp_path, text, told):
    """Also where torch cannot be imported."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(machine.platform, "processor", lambda: "a name")
    monkeypatch.setattr(doctor, "count_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for threads in (", 1 thread in use", ""):
        check = check_of("CPU")
        assert (check.state, check.value) == ("ok", told.format(threads))
        monkeypatch.setitem(sys.modules, "torch", None)
