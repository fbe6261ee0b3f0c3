"""report versions and check which features work on this machine

Features are tested, not derived from version numbers: fairseq 0.12.2, its main branch and our build have the same
``fairseq.__version__``. Exit code 0: translation models can be trained on this machine; 1: they cannot.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict

from fairseq_deep.tools import allocator
from fairseq_deep.tools.flags import actions
from fairseq_deep.tools.machine import Check, check_compiler, check_cpu, check_python, check_space
from fairseq_deep.tools.tables import format_table

SET_UP = "pip install -r requirements.txt"
BF16_CAPABILITY = 8  # major compute capability of the first GPUs with bf16
EXTENSIONS = ("fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast", "fairseq.libbleu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the form of the report."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--verbose", action="store_true", help="also list this package's changes to fairseq")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if translation models can be trained on this machine, otherwise 1."""
    checks = [check for group in GROUPS for check in _guarded(group)]
    failed = [check.name for check in checks if check.state == "FAIL"]
    patches = _patches()
    if args.json:
        report = {"training_works": not failed, "checks": [asdict(check) for check in checks], "patches": patches}
        print(json.dumps(report, indent=2))
        return 1 if failed else 0
    print(format_table([(check.name, check.state, check.value) for check in checks]))
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


def _guarded(group) -> Iterator[Check]:
    """Run one group of checks; an exception in a check becomes a warning in the report."""
    try:
        yield from group()
    except Exception as error:
        name = group.__name__.removeprefix("check").strip("_").replace("_", " ")
        yield Check(name, "warn", "cannot be checked", f"{type(error).__name__}: {_first_line(error)}", SET_UP)


def _torch() -> Iterator[Check]:
    torch, error = _try_import("torch")
    if error:
        yield Check("torch", "FAIL", "cannot be imported", error, SET_UP)
        return
    yield Check("torch", "ok", f"{torch.__version__} ({torch.get_num_threads()} threads)")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if device.major >= BF16_CAPABILITY else "no bf16"
            yield Check(f"GPU {index}", "ok", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {bf16}")
        return
    driver = shutil.which("nvidia-smi")
    if torch.version.cuda and driver:
        reason = f"torch is built for CUDA {torch.version.cuda} but sees no device"
        yield Check("GPU", "no", "none usable", reason, "check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES")
    elif torch.version.cuda:
        yield Check("GPU", "no", "none (a GPU would need NVIDIA's driver)")
    elif driver:
        cure = "install the CUDA build of torch for this driver (see pytorch.org)"
        yield Check("GPU", "no", "not usable", "this machine has an NVIDIA driver, but torch is a CPU build", cure)
    else:
        yield Check("GPU", "no", "none (CPU build of torch)")


def _allocator() -> Iterator[Check]:
    torch, _ = _try_import("torch")
    if not sys.platform.startswith("linux") or torch and torch.cuda.is_available():
        return
    name = allocator.find()
    if name:
        yield Check("allocator", "ok", f"{name} (recipes use it to train on a CPU)")
    else:
        reason = "with tcmalloc, recipes train on a CPU 1.05 to 1.4 times as fast"
        cure = "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu)"
        yield Check("allocator", "no", "the C library's", reason, cure)


def _numpy() -> Iterator[Check]:
    numpy, error = _try_import("numpy")
    if error:
        yield Check("numpy", "FAIL", "cannot be imported", error, SET_UP)
    else:
        dataset, missing = _try_import("fairseq.data.language_pair_dataset")
        uses_compat = not missing and "np.compat.long" in inspect.getsource(dataset)
        if uses_compat and not hasattr(getattr(numpy, "compat", None), "long"):
            reason = "--num-batch-buckets and language models of this fairseq need numpy.compat, removed in numpy 2"
            yield Check("numpy", "warn", numpy.__version__, reason, f"pip install 'numpy<2', or {SET_UP}")
        else:
            yield Check("numpy", "ok", numpy.__version__)


def _fairseq() -> Iterator[Check]:
    fairseq, error = _try_import("fairseq")
    if error:
        reason = error
        if "No module named 'fairseq'" in error:
            reason = "it is not installed; training requires it, translating packaged models does not"
        if "mutable default" in error:
            reason += "; stock fairseq 0.12.2 requires Python 3.10 or older"
        yield Check("fairseq", "FAIL", "cannot be imported", reason, f"{SET_UP} (brings fairseq 0.12.2+deep9)")
        return
    version, kind = _fairseq_kind()
    yield Check("fairseq", "ok", f"{version}, {kind} ({os.path.dirname(fairseq.__file__)})")
    broken = {name: error for name in EXTENSIONS for error in [_try_import(name)[1]] if error}
    if broken:
        names = ", ".join(name.rpartition(".")[2] for name in broken)
        yield Check("extensions", "FAIL", f"missing: {names}", "; ".join(broken.values()), f"a C++ compiler, {SET_UP}")
        return
    yield Check("extensions", "ok", ", ".join(name.rpartition(".")[2] for name in EXTENSIONS))


def _fairseq_kind() -> tuple[str, str]:
    """Return fairseq's version and the kind of its build.

    Encoder layers of release 0.12.2 have a second, unused copy of their weights, unlike layers of the main branch.
    """
    from fairseq.models.transformer import TransformerConfig
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    try:
        version = importlib.metadata.version("fairseq")
    except importlib.metadata.PackageNotFoundError:
        version = sys.modules["fairseq"].__version__
    config = TransformerConfig()
    config.encoder.embed_dim, config.encoder.ffn_embed_dim, config.encoder.attention_heads = 4, 4, 1
    layer = TransformerEncoderLayerBase(config)
    if not hasattr(layer, "in_proj_weight"):
        return version, "main branch"
    return version, "our build" if "+deep" in version else "stock release"


class _Planted:
    """An object that calls a (harmless) function when it is unpickled, like a malicious checkpoint."""

    def __reduce__(self):
        return os.getpid, ()


def _checkpoints() -> Iterator[Check]:
    """Load an ordinary checkpoint with fairseq, then one with planted code."""
    torch, error = _try_import("torch")
    if error or _try_import("fairseq.checkpoint_utils")[1]:
        return

    with tempfile.TemporaryDirectory() as folder:
        good, bad = os.path.join(folder, "good.pt"), os.path.join(folder, "bad.pt")
        content = {"cfg": {"model": argparse.Namespace(arch="x")}, "extra_state": {"train_iterator": None}}
        content["optimizer_history"] = [{"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}]
        torch.save(content, good)
        torch.save({**content, "planted": _Planted()}, bad)
        error, refusal = _load_error(good), _load_error(bad)
    if error:
        reason = f"fairseq cannot load its own checkpoints with torch {torch.__version__}, so no run can resume"
        cure = f"{SET_UP} (brings fairseq 0.12.2+deep9), or for your own: export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
        yield Check("checkpoints", "FAIL", "refused", f"{reason} ({error})", cure)
    elif not refusal:
        reason = "this fairseq runs code hidden in checkpoints"
        yield Check("checkpoints", "warn", "loaded, unsafely", reason, f"load only your own, or {SET_UP}")
    else:
        yield Check("checkpoints", "ok", "loaded safely")


def _load_error(path: str) -> str:
    from fairseq import checkpoint_utils

    try:
        checkpoint_utils.load_checkpoint_to_cpu(path)
    except Exception as error:
        return _first_line(error)
    return ""


def _last_batch() -> Iterator[Check]:
    """Batch 9 sentences with at most 8 per batch; fairseq's main branch drops the ninth."""
    np, error = _try_import("numpy")
    data_utils, other_error = _try_import("fairseq.data.data_utils")
    if error or other_error or _try_import(EXTENSIONS[0])[1]:
        return
    lengths = np.ones(9, dtype=np.int64)
    batches = data_utils.batch_by_size(
        np.arange(9), lambda index: 1, num_tokens_vec=lengths, max_sentences=8, required_batch_size_multiple=8
    )
    kept = sum(len(batch) for batch in batches)
    if kept == 9:
        yield Check("last batch", "ok", "kept")
    else:
        reason = "this fairseq drops the last batch if its size is not a multiple of 8: sentences are not translated"
        cure = f"--required-batch-size-multiple 1 in every command, or {SET_UP} (brings fairseq 0.12.2+deep9)"
        yield Check("last batch", "warn", f"{9 - kept} of 9 sentences dropped", reason, cure)


def _plugin() -> Iterator[Check]:
    """Import the package through ``--user-dir`` in a new process, like fairseq-train."""
    import fairseq_deep

    folder = os.path.abspath(fairseq_deep.__path__[0])
    program = (
        "import argparse, sys; from fairseq import utils; from fairseq.models import ARCH_MODEL_NAME_REGISTRY as names;"
        "utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]));"
        "print('registered', sum(arch in names for arch in sys.modules['fairseq_deep'].list_archs()))"
    )
    result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=300)
    last = (result.stdout.strip().splitlines() or [""])[-1]
    number = int(last.rpartition(" ")[2]) if result.returncode == 0 and last.startswith("registered ") else 0
    if number:
        yield Check("--user-dir", "ok", f"{number} architectures ({folder})")
    else:
        reason = (result.stderr.strip().splitlines() or ["no architecture was registered"])[-1]
        yield Check("--user-dir", "FAIL", "cannot be imported", reason, SET_UP)


def _methods() -> Iterator[Check]:
    """Report plugins with methods, and methods whose flags this fairseq has as well."""
    from fairseq_deep.core.description import REGISTRIES
    from fairseq_deep.core.registry import PLUGINS

    for name, error in PLUGINS.items():
        state = ("FAIL", "cannot be imported", error, "correct or uninstall it") if error else ("ok", "imported")
        yield Check(f"plugin {name}", *state)
    patches, missing = _try_import("fairseq_deep.plugin.patches")
    if missing:
        return
    options = patches.fairseq_options()
    both = {f"{registry.kind} {name}" for registry in REGISTRIES for name in registry.names()
            if options & actions(registry.get(name).add_args).keys()}  # fmt: skip
    if both:
        reason = "fairseq has flags of the same name, so every training run fails"
        yield Check("flags of methods", "FAIL", ", ".join(sorted(both)), reason, "rename them, or " + SET_UP)


def _console_scripts() -> Iterator[Check]:
    script, folder = shutil.which("fairseq-train"), os.path.dirname(sys.executable)
    cure = f"export PATH={folder}:$PATH"
    if script is None:
        yield Check("fairseq-train", "warn", "not on PATH", "the environment is not active", cure)
    elif os.path.realpath(os.path.dirname(script)) != os.path.realpath(folder):
        yield Check("fairseq-train", "warn", script, f"it belongs to another environment than {sys.executable}", cure)
    else:
        yield Check("fairseq-train", "ok", script)


def _precision() -> Iterator[Check]:
    """Check fairseq's reduced-precision flags."""
    torch, error = _try_import("torch")
    options, other_error = _try_import("fairseq.options")
    if error or other_error:
        return
    cuda = torch.cuda.is_available()
    if cuda:
        yield Check("--fp16", "ok", "usable")
        yield Check("--amp", "ok", "usable (fp16)")
    else:
        other = ", or --memory-efficient-fp16" if _cpu_computes(torch, torch.float16) else ""
        yield Check("--fp16", "no", f"only on a GPU (here fp32{other})")
        yield Check("--amp", "ok", "runs, without effect on a CPU")
    if "args.tpu = True" in inspect.getsource(options):
        reason = "this fairseq interprets --bf16 as a request for a TPU"
        yield Check("--bf16", "no", "not usable", reason, f"{SET_UP} (brings fairseq 0.12.2+deep9)")
    elif cuda and torch.cuda.get_device_properties(0).major < BF16_CAPABILITY:
        yield Check("--bf16", "no", "not usable", "this GPU only emulates bf16", "use --fp16")
    elif not cuda and not _cpu_computes(torch, torch.bfloat16):
        yield Check("--bf16", "no", "not usable", "this torch does not support bf16 on a CPU", "train in fp32")
    else:
        yield Check("--bf16", "ok", "usable" if cuda else "usable (slow on a CPU)")


def _cpu_computes(torch, dtype) -> bool:
    try:
        matrix = torch.ones(8, 8, dtype=dtype, requires_grad=True)
        torch.nn.functional.layer_norm(matrix @ matrix, (8,)).softmax(-1).sum().backward()
    except RuntimeError:
        return False
    return True


def _text_tools() -> Iterator[Check]:
    purposes = {
        "sacrebleu": "fairseq-deep score",
        "subword-nmt": "BPE",
        "sacremoses": "tokenising and detokenising",
        "safetensors": "fairseq-deep package, and packaged models",
    }
    for package, purpose in purposes.items():
        try:
            yield Check(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "no", "not installed", f"required for {purpose}", f"pip install {package}")


def _try_import(name: str) -> tuple[object | None, str]:
    """Return a module and "", or None and the reason why it cannot be imported; its output is discarded."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            logging.getLogger("fairseq").setLevel(logging.ERROR)
            return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _decoding() -> Iterator[Check]:
    """Report the matrix products used for translation on this processor."""
    machine, error = _try_import("fairseq_deep.core.decoding.machine")
    if not error:
        yield Check("decoding", "ok", machine.describe())


GROUPS = (
    check_python,
    check_cpu,
    check_space,
    _torch,
    _allocator,
    _numpy,
    _fairseq,
    _checkpoints,
    _last_batch,
    _plugin,
    _methods,
    _console_scripts,
    _precision,
    _decoding,
    _text_tools,
    check_compiler,
)
