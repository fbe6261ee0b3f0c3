"""fairseq-deep doctor: what it reports here, and on machines that are put together for it."""

import importlib
import json
import shutil
import sys
import types

import fairseq
import pytest
import torch

from fairseq_deep import list_archs
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin import patches
from fairseq_deep.plugin.patches import OTHERS, PATCHES
from fairseq_deep.tools import doctor, machine
from fairseq_deep.tools.main import main


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


def fake_gpu(monkeypatch, major):
    """Make torch report one GPU of compute capability `major`."""
    device = types.SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=major)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)


def test_report_of_this_environment(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    assert code == 0 and report["training_works"], [c for c in report["checks"] if c["state"] == "FAIL"]
    expected = {"Python", "platform", "CPU", "free disk", "torch", "numpy", "fairseq", "extensions", "checkpoints"}
    expected |= {"last batch", "--user-dir", "fairseq-train", "--fp16", "--bf16", "--amp"}
    expected |= {"sacrebleu", "subword-nmt", "sacremoses", "compiler"}
    assert expected <= checks.keys()
    assert torch.__version__ in checks["torch"]["value"]
    assert int(checks["--user-dir"]["value"].split()[0]) == len(list_archs())  # as `archs` counts
    assert all(check["state"] in ("ok", "warn", "no", "FAIL") for check in report["checks"])
    assert all(check["reason"] for check in report["checks"] if check["state"] in ("warn", "FAIL"))


def test_table_gives_reasons_and_cures_then_the_verdict(monkeypatch, capsys):
    def sick():
        yield doctor.Check("one", "ok", "fine")
        yield doctor.Check("second", "FAIL", "broken", "because", "do this")

    monkeypatch.setattr(doctor, "GROUPS", (sick,))
    monkeypatch.setattr(doctor, "_patches", lambda: [])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "one     ok    fine\nsecond  FAIL  broken\n\nsecond: because\n  fix: do this\n\n"
        "Training does not work here: second.\nPackaged models can be translated here.\n"
    )


def test_errors_are_one_line_with_another_fairseq(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
    monkeypatch.setitem(sys.modules, "fairseq.safe_exit", None)
    monkeypatch.delattr(fairseq, "safe_exit", raising=False)
    patches.report_on_one_line()
    for error in (UsageError("--a: problem; fix"), ValueError("b")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "fairseq_deep: --a: problem; fix\na traceback\n"


def test_patches_of_fairseq_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "GROUPS", ())
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "\n\nTraining works here.\n"
    assert main(["doctor", "--verbose"]) == 0
    heading, _, table = capsys.readouterr().out.strip().partition("\n\n")[0].partition("\n")
    assert heading == "Changes to fairseq and torch at import, with reasons:"
    known = {**{f"{each.where}.{each.name}".replace(":", "."): each.reason for each in PATCHES}, **OTHERS}
    assert [tuple(line.split(maxsplit=1)) for line in table.splitlines()] == [*known.items()]
    assert main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["patches"]) == len(PATCHES) + len(OTHERS)


def test_a_check_that_breaks_is_reported_and_the_rest_goes_on(monkeypatch, capsys):
    def check_odd_machine():
        raise OSError("no such thing")

    def fine():
        yield doctor.Check("other", "ok", "fine")

    monkeypatch.setattr(doctor, "GROUPS", (check_odd_machine, fine))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "odd machine  warn  cannot be checked" in printed and "OSError: no such thing" in printed
    assert "other        ok    fine" in printed


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10, 18), "warn"), ((3, 11, 1), "ok"), ((3, 14, 0), "ok"), ((3, 15, 0), "warn")]
)
def test_python_outside_the_range_is_warned_about(monkeypatch, version, state):
    monkeypatch.setattr(sys, "version_info", version)
    assert by_name(machine.check_python)["Python"].state == state


def test_missing_torch_or_numpy_is_fatal(without):
    without("torch", "no torch today")
    check = by_name(doctor._torch)["torch"]
    assert (check.state, check.cure) == ("FAIL", doctor.SET_UP) and "no torch today" in check.reason
    assert not list(doctor._checkpoints()) and not list(doctor._precision())
    without("numpy", "no numpy today")
    assert by_name(doctor._numpy)["numpy"].state == "FAIL"
    assert not list(doctor._last_batch())


def test_published_fairseq_is_named(without):
    without("fairseq", "mutable default <class 'X'> for field common is not allowed")
    check = by_name(doctor._fairseq)["fairseq"]
    assert check.state == "FAIL" and "Python 3.10 or older" in check.reason and "0.12.2+deep9" in check.cure
    assert not list(doctor._checkpoints()) and not list(doctor._last_batch())


def test_missing_extension_is_named(without):
    without("fairseq.libbleu", "no libbleu")
    checks = by_name(doctor._fairseq)
    assert checks["fairseq"].state == "ok"
    assert checks["extensions"].state == "FAIL" and checks["extensions"].value == "missing: libbleu"


@pytest.mark.parametrize(
    ("dead_weights", "version", "kind"),
    [(True, "0.12.2+deep9", "our build"), (True, "0.12.2", "stock release"), (False, "0.12.2", "main branch")],
)
def test_kind_of_fairseq_is_seen_from_its_features(monkeypatch, dead_weights, version, kind):
    class Layer:
        def __init__(self, config):
            if dead_weights:
                self.in_proj_weight = None

    monkeypatch.setattr("fairseq.modules.transformer_layer.TransformerEncoderLayerBase", Layer)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert doctor._fairseq_kind() == (version, kind)


def plain_load(path, **options):
    return torch.load(path, **options)


@pytest.mark.parametrize(
    ("load", "state", "value"),
    [
        (lambda path: (_ for _ in ()).throw(RuntimeError("Weights only load failed")), "FAIL", "refused"),
        (lambda path: plain_load(path, weights_only=False), "warn", "loaded, unsafely"),
    ],
)
def test_fairseq_that_refuses_or_trusts_every_checkpoint(monkeypatch, load, state, value):
    monkeypatch.setattr("fairseq.checkpoint_utils.load_checkpoint_to_cpu", load)
    (check,) = doctor._checkpoints()
    assert (check.name, check.state, check.value) == ("checkpoints", state, value)
    assert ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in check.cure) == (state == "FAIL")


def test_fairseq_that_drops_the_last_batch(monkeypatch):
    from fairseq.data import data_utils

    complete = data_utils.batch_by_size
    (check,) = doctor._last_batch()
    assert (check.state, check.value) == ("ok", "kept")
    monkeypatch.setattr(data_utils, "batch_by_size", lambda *args, **options: complete(*args, **options)[:-1])
    (check,) = doctor._last_batch()
    assert check.state == "warn" and check.value == "1 of 9 sentences dropped"
    assert "multiple of 8" in check.reason and "--required-batch-size-multiple 1" in check.cure


def test_plugin_that_cannot_be_imported(monkeypatch, tmp_path):
    import fairseq_deep

    package = tmp_path / "broken_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.setattr(fairseq_deep, "__path__", [str(package)])
    (check,) = doctor._plugin()
    assert (check.name, check.state) == ("--user-dir", "FAIL") and "broken on purpose" in check.reason


def test_console_scripts_of_another_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (check,) = doctor._console_scripts()
    assert (check.state, check.value) == ("warn", "not on PATH") and check.cure.startswith("export PATH=")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    (check,) = doctor._console_scripts()
    assert check.state == "warn" and "another environment" in check.reason


@pytest.mark.parametrize(("major", "state"), [(7, "no"), (8, "ok"), (9, "ok")])
def test_precision_on_a_gpu(monkeypatch, major, state):
    fake_gpu(monkeypatch, major)
    monkeypatch.setattr(doctor.inspect, "getsource", lambda module: "")
    checks = by_name(doctor._precision)
    assert checks["--fp16"].state == checks["--amp"].state == "ok"
    assert checks["--bf16"].state == state
    gpu = by_name(doctor._torch)["GPU 0"]
    assert gpu.value == f"Test GPU, 80 GiB, {'bf16' if state == 'ok' else 'no bf16'}"


def test_precision_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.inspect, "getsource", lambda module: "")
    monkeypatch.setattr(doctor, "_cpu_computes", lambda torch, dtype: False)
    checks = by_name(doctor._precision)
    assert checks["--fp16"] == doctor.Check("--fp16", "no", "only on a GPU (here fp32)")
    assert checks["--bf16"].state == "no"
    monkeypatch.setattr(doctor, "_cpu_computes", lambda torch, dtype: True)
    checks = by_name(doctor._precision)
    assert checks["--fp16"].value.endswith(", or --memory-efficient-fp16)") and checks["--bf16"].state == "ok"


def test_bf16_of_stock_fairseq(monkeypatch):
    monkeypatch.setattr(doctor.inspect, "getsource", lambda module: "    args.tpu = True\n")
    check = by_name(doctor._precision)["--bf16"]
    assert check.state == "no" and "TPU" in check.reason


def test_cpu_computation_is_tried():
    assert doctor._cpu_computes(torch, torch.float32)
    assert not doctor._cpu_computes(torch, torch.int64)


@pytest.mark.parametrize(
    ("cuda", "driver", "reason"),
    [
        ("12.4", "/usr/bin/nvidia-smi", "sees no device"),
        ("12.4", None, ""),
        (None, "/usr/bin/nvidia-smi", "CPU build"),
        (None, None, ""),
    ],
)
def test_machine_without_a_usable_gpu(monkeypatch, cuda, driver, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    check = by_name(doctor._torch)["GPU"]
    assert check.state == "no" and reason in check.reason and bool(check.cure) == bool(reason)


XEON = """processor\t: 0
model name\t: A Xeon
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_vnni amx_int8

processor\t: 1
model name\t: another
flags\t\t: avx2
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        (XEON, "A Xeon", "avx2 fma avx512f avx512_vnni amx_int8"),
        (GRAVITON, "a name", "asimd asimddp sve bf16 i8mm"),
        (None, "a name", "instructions unknown"),
    ],
)
def test_processor_and_its_instructions(monkeypatch, tmp_path, text, name, instructions):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(machine.platform, "processor", lambda: "a name")
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (check,) = machine.check_cpu()
    assert (check.state, check.value) == ("ok", f"{name}, 2 cores, 1 thread in use; {instructions}")


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(machine, "count_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (check,) = machine.check_cpu()
    assert check.state == "warn" and "1 core, 4 threads in use" in check.value
    assert check.cure == "export OMP_NUM_THREADS=1"


def test_processor_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    (check,) = machine.check_cpu()
    assert check.state == "ok" and ", 2 cores; " in check.value


def test_little_disk_and_no_compiler(monkeypatch):
    usage = types.SimpleNamespace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert by_name(machine.check_space)["free disk"].state == "warn"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (check,) = machine.check_compiler()
    assert check.state == "no" and "g++" in check.cure


def test_missing_text_tool_names_its_cure(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = by_name(doctor._text_tools)
    assert {name: check.cure for name, check in checks.items()} == {
        name: f"pip install {name}" for name in ("sacrebleu", "subword-nmt", "sacremoses", "safetensors")
    }


def test_numpy_2_with_a_fairseq_that_needs_numpy_compat(monkeypatch):
    import numpy

    monkeypatch.setattr(doctor.inspect, "getsource", lambda module: "otypes=[np.compat.long]")
    monkeypatch.delattr(numpy, "compat", raising=False)
    check = by_name(doctor._numpy)["numpy"]
    assert check.state == "warn" and "--num-batch-buckets" in check.reason and "numpy<2" in check.cure
