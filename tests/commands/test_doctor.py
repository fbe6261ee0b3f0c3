"""fairseq-deep doctor: what it reports here, and on machines that are put together for it."""

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


def by_name(group):
    """Return the checks of one group by their names."""
    return {check.name: check for check in group()}


@pytest.fixture
def without(monkeypatch):
    """A function that makes the import of a module fail with a message."""
    real = importlib.import_module

    def install(missing, message):
        def fake(name, package=None):
            if name == missing or name.startswith(missing + "."):
                raise ImportError(message)
            return real(name, package)

        monkeypatch.setattr(importlib, "import_module", fake)

    return install


def test_the_report_of_this_environment(command):
    code, out, _ = command("doctor", "--json")
    report = json.loads(out)
    checks = {check["name"]: check for check in report["checks"]}
    assert code == 0 and report["training_works"], [c for c in report["checks"] if c["state"] == "FAIL"]
    expected = {"Python", "platform", "CPU", "free disk", "torch", "numpy", "fairseq", "extensions", "checkpoints"}
    expected |= {"last batch", "--user-dir", "fairseq-train", "--fp16", "--bf16", "--amp"}
    expected |= {"sacrebleu", "subword-nmt", "sacremoses", "compiler"}
    assert expected <= checks.keys() and len(report["patches"]) == len(PATCHES) + len(OTHERS)
    assert torch.__version__ in checks["torch"]["value"]
    assert int(checks["--user-dir"]["value"].split()[0]) == len(list_archs())  # as `archs` counts
    assert all(check["state"] in ("ok", "warn", "no", "FAIL") for check in report["checks"])
    assert all(check["reason"] for check in report["checks"] if check["state"] in ("warn", "FAIL"))


def test_the_table_gives_reasons_and_fixes_then_the_verdict(monkeypatch, command):
    def sick():
        yield doctor.Check("one", "ok", "fine")
        yield doctor.Check("second", "FAIL", "broken", "because", "do this")

    monkeypatch.setattr(doctor, "GROUPS", (sick,))
    monkeypatch.setattr(doctor, "_patches", lambda: [])
    assert command("doctor")[:2] == (1, (
        "one     ok    fine\nsecond  FAIL  broken\n\nsecond: because\n  fix: do this\n\n"
        "Training does not work here: second.\nPackaged models can be translated here.\n"
    ))  # fmt: skip


def test_a_check_that_breaks_is_reported_and_the_rest_goes_on(monkeypatch, command):
    def check_odd_machine():
        raise OSError("no such thing")

    def fine():
        yield doctor.Check("other", "ok", "fine")

    monkeypatch.setattr(doctor, "GROUPS", (check_odd_machine, fine))
    code, printed, _ = command("doctor")
    assert code == 0 and "odd machine  warn  cannot be checked" in printed and "OSError: no such thing" in printed
    assert "other        ok    fine" in printed


def test_patches_of_fairseq_are_listed(monkeypatch, command):
    monkeypatch.setattr(doctor, "GROUPS", ())
    assert command("doctor")[:2] == (0, "\n\nTraining works here.\n")
    printed = command("doctor", "--verbose")[1]
    heading, _, table = printed.strip().partition("\n\n")[0].partition("\n")
    assert heading == "Changes to fairseq and torch at import, with reasons:"
    known = {**{f"{each.where}.{each.name}".replace(":", "."): each.reason for each in PATCHES}, **OTHERS}
    assert [tuple(line.split(maxsplit=1)) for line in table.splitlines()] == [*known.items()]


def test_errors_are_one_line_with_another_fairseq(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
    monkeypatch.setitem(sys.modules, "fairseq.safe_exit", None)
    monkeypatch.delattr(fairseq, "safe_exit", raising=False)
    patches.report_on_one_line()
    for error in (UsageError("--a: problem; fix"), ValueError("b")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "fairseq_deep: --a: problem; fix\na traceback\n"


@pytest.mark.parametrize("missing, message, group, name, words, silent", [
    ("torch", "no torch today", doctor._torch, "torch", [doctor.SET_UP, "no torch today"],
     [doctor._checkpoints, doctor._precision]),
    ("numpy", "no numpy today", doctor._numpy, "numpy", ["no numpy today"], [doctor._last_batch]),
    ("fairseq", "mutable default <class 'X'> for field common is not allowed", doctor._fairseq, "fairseq",
     ["Python 3.10 or older", "0.12.2+deep9"], [doctor._checkpoints, doctor._last_batch]),
    ("fairseq.libbleu", "no libbleu", doctor._fairseq, "extensions", ["missing: libbleu"], []),
])  # fmt: skip
def test_what_cannot_be_imported_is_fatal(without, missing, message, group, name, words, silent):
    """And checks that need it are left out."""
    without(missing, message)
    check = by_name(group)[name]
    told = f"{check.value} {check.reason} {check.cure}"
    assert check.state == "FAIL" and all(word in told for word in words), told
    assert not any(check for each in silent for check in each())


@pytest.mark.parametrize("dead_weights, version, kind", [
    (True, "0.12.2+deep9", "our build"), (True, "0.12.2", "stock release"), (False, "0.12.2", "main branch"),
])  # fmt: skip
def test_the_kind_of_fairseq_is_seen_from_its_features(monkeypatch, dead_weights, version, kind):
    class Layer:
        def __init__(self, config):
            if dead_weights:
                self.in_proj_weight = None

    monkeypatch.setattr("fairseq.modules.transformer_layer.TransformerEncoderLayerBase", Layer)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert doctor._fairseq_kind() == (version, kind)


def refuses(path, **_):
    raise RuntimeError("Weights only load failed")


def trusts(path, load=torch.load, **_):
    return load(path, weights_only=False)


@pytest.mark.parametrize("load, state, value", [(refuses, "FAIL", "refused"), (trusts, "warn", "loaded, unsafely")])
def test_a_fairseq_that_refuses_or_trusts_every_checkpoint(monkeypatch, load, state, value):
    monkeypatch.setattr("fairseq.checkpoint_utils.load_checkpoint_to_cpu", load)
    (check,) = doctor._checkpoints()
    assert (check.name, check.state, check.value) == ("checkpoints", state, value)
    assert ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in check.cure) == (state == "FAIL")


def test_a_fairseq_that_drops_the_last_batch(monkeypatch):
    from fairseq.data import data_utils

    complete = data_utils.batch_by_size
    (check,) = doctor._last_batch()
    assert (check.state, check.value) == ("ok", "kept")
    monkeypatch.setattr(data_utils, "batch_by_size", lambda *args, **options: complete(*args, **options)[:-1])
    (check,) = doctor._last_batch()
    assert check.state == "warn" and check.value == "1 of 9 sentences dropped"
    assert "multiple of 8" in check.reason and "--required-batch-size-multiple 1" in check.cure


def test_a_plugin_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "broken_plugin").mkdir()
    (tmp_path / "broken_plugin/__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.setattr(fairseq_deep, "__path__", [str(tmp_path / "broken_plugin")])
    (check,) = doctor._plugin()
    assert (check.name, check.state) == ("--user-dir", "FAIL") and "broken on purpose" in check.reason


def gpu(major):
    """One GPU of this compute capability."""
    device = types.SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=major)
    return {"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_properties": lambda index: device, SOURCE: lambda module: ""}  # fmt: skip


def cpu(computes=True, cuda=None, driver=None):
    """No GPU, with the builds of torch for *cuda*, and a driver or none."""
    return {"torch.cuda.is_available": lambda: False, "torch.version.cuda": cuda, "shutil.which": lambda name: driver,
            "fairseq_deep.tools.doctor._cpu_computes": lambda torch, dtype: computes,
            SOURCE: lambda module: ""}  # fmt: skip


def threads(count, cores, **more):
    return {"fairseq_deep.tools.machine.count_cores": lambda: cores, "torch.get_num_threads": lambda: count, **more}


def absent(package):
    raise importlib.metadata.PackageNotFoundError(package)


SOURCE = "fairseq_deep.tools.doctor.inspect.getsource"
MACHINES = [  # group of checks, what is put in the place of what, name, state and parts of value, reason and fix
    (machine.check_python, {"sys.version_info": (3, 10, 18)}, "Python", "warn", ["3.11 to 3.14"]),
    (machine.check_python, {"sys.version_info": (3, 11, 1)}, "Python", "ok", []),
    (machine.check_python, {"sys.version_info": (3, 14, 0)}, "Python", "ok", []),
    (machine.check_python, {"sys.version_info": (3, 15, 0)}, "Python", "warn", []),
    (doctor._console_scripts, {"shutil.which": lambda name: None}, "fairseq-train", "warn",
     ["not on PATH", "export PATH="]),
    (doctor._console_scripts, {"shutil.which": lambda name: f"/odd/{name}"}, "fairseq-train", "warn",
     ["another environment"]),
    *((doctor._precision, gpu(major), name, state, []) for major, states in ((7, "ok ok no"), (8, "ok ok ok"),
                                                                            (9, "ok ok ok"))
      for name, state in zip(("--fp16", "--amp", "--bf16"), states.split())),
    (doctor._torch, gpu(7), "GPU 0", "ok", ["Test GPU, 80 GiB, no bf16"]),
    (doctor._torch, gpu(8), "GPU 0", "ok", ["Test GPU, 80 GiB, bf16"]),
    (doctor._precision, cpu(False), "--fp16", "no", ["only on a GPU (here fp32)"]),
    (doctor._precision, cpu(False), "--bf16", "no", []),
    (doctor._precision, cpu(), "--fp16", "no", [", or --memory-efficient-fp16)"]),
    (doctor._precision, cpu(), "--bf16", "ok", []),
    (doctor._precision, {SOURCE: lambda module: "    args.tpu = True\n"}, "--bf16", "no", ["TPU"]),
    (doctor._torch, cpu(cuda="12.4", driver="/usr/bin/nvidia-smi"), "GPU", "no", ["sees no device", "CUDA_VISIBLE"]),
    (doctor._torch, cpu(cuda="12.4"), "GPU", "no", ["none (a GPU would need NVIDIA's driver)"]),
    (doctor._torch, cpu(driver="/usr/bin/nvidia-smi"), "GPU", "no", ["CPU build", "pytorch.org"]),
    (doctor._torch, cpu(), "GPU", "no", ["none (CPU build of torch)"]),
    (machine.check_cpu, threads(4, 1), "CPU", "warn", ["1 core, 4 threads in use", "export OMP_NUM_THREADS=1"]),
    (machine.check_space, {"shutil.disk_usage": lambda path: types.SimpleNamespace(free=2**30)}, "free disk", "warn",
     []),
    (machine.check_compiler, {"shutil.which": lambda name: None}, "compiler", "no", ["g++"]),
    *((doctor._text_tools, {"importlib.metadata.version": absent}, name, "no", [f"pip install {name}"])
      for name in ("sacrebleu", "subword-nmt", "sacremoses", "safetensors")),
    (doctor._numpy, {"numpy.compat": None, SOURCE: lambda module: "otypes=[np.compat.long]"}, "numpy", "warn",
     ["--num-batch-buckets", "numpy<2"]),
]  # fmt: skip


@pytest.mark.parametrize("group, fakes, name, state, parts", [
    pytest.param(*row, id=f"{row[2]} {row[3]} {' '.join(row[4])[:40]}") for row in MACHINES
])  # fmt: skip
def test_other_machines(monkeypatch, group, fakes, name, state, parts):
    for place, value in fakes.items():
        monkeypatch.setattr(place, value, raising=place != "numpy.compat")
    check = by_name(group)[name]
    told = f"{check.value} {check.reason} {check.cure}"
    assert check.state == state and all(part in told for part in parts), told
    assert bool(check.reason) == bool(check.cure)


def test_computation_on_the_cpu_is_tried():
    assert doctor._cpu_computes(torch, torch.float32)
    assert not doctor._cpu_computes(torch, torch.int64)


XEON = """processor\t: 0
model name\t: A Xeon
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_vnni amx_int8

processor\t: 1
model name\t: another
flags\t\t: avx2
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n"


@pytest.mark.parametrize("text, name, instructions", [
    (XEON, "A Xeon", "avx2 fma avx512f avx512_vnni amx_int8"),
    (GRAVITON, "a name", "asimd asimddp sve bf16 i8mm"),
    (None, "a name", "instructions unknown"),
])  # fmt: skip
def test_the_processor_and_its_instructions(monkeypatch, tmp_path, text, name, instructions):
    """Also where torch cannot be imported."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(machine.platform, "processor", lambda: "a name")
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (check,) = machine.check_cpu()
    assert (check.state, check.value) == ("ok", f"{name}, 2 cores, 1 thread in use; {instructions}")
    monkeypatch.setitem(sys.modules, "torch", None)
    (check,) = machine.check_cpu()
    assert (check.state, check.value) == ("ok", f"{name}, 2 cores; {instructions}")
