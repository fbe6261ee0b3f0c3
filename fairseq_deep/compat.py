"""What depends on the versions of fairseq and torch: features are tested, not version numbers."""

import argparse
import contextlib
import functools
import hashlib
import os
from typing import Any, Callable, Dict, Optional

FAIRSEQ_ERROR: Optional[BaseException] = None
"""Why fairseq cannot be imported, or None if it can."""

try:
    import fairseq  # noqa: F401
except Exception as error:  # an incompatible fairseq fails in many ways; `fairseq-deep doctor` tells which
    FAIRSEQ_ERROR = error


def load_checkpoint(path: str) -> Dict[str, Any]:
    """A fairseq checkpoint as the dictionary that was saved, on the CPU.

    No code of the file is run wherever fairseq is the one that ``third_party/fairseq`` builds, or torch is 2.4 or
    newer; with an older torch under another fairseq it is loaded as that fairseq itself would.
    """
    import torch

    try:
        from fairseq.safe_load import load
    except ImportError:
        if not hasattr(torch.serialization, "safe_globals"):
            return torch.load(path, map_location="cpu")
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    return load(path, map_location="cpu")


def sha256(path: str) -> str:
    """The sum of a file, in hexadecimal digits (``hashlib.file_digest`` is of Python 3.11)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def register_format(ending: str, read: Callable[[str], Dict[str, Any]]) -> None:
    """Have fairseq read checkpoints with names like *ending* by *read*, a function of the path.

    Only the fairseq that ``third_party/fairseq`` builds can be told; others stay as they are.
    """
    if reads_formats():
        from fairseq import safe_load

        safe_load.FORMATS[ending] = read


def reads_formats() -> bool:
    """Whether this fairseq can be told of other formats of checkpoints."""
    try:
        from fairseq import safe_load
    except ImportError:
        return False
    return hasattr(safe_load, "FORMATS")


def model_flags(state: Dict[str, Any]) -> Dict[str, Any]:
    """The flags that the model of a checkpoint was built with."""
    flags = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    return dict(flags if hasattr(flags, "keys") else vars(flags))


def to_restore(folder: str, no_last: bool) -> str:
    """The checkpoint in *folder* that fairseq-train goes on from; "" if it begins anew.

    Args:
        no_last: whether the training writes no ``checkpoint_last.pt``
    """
    path = os.path.join(folder, "checkpoint_last.pt")
    try:
        from fairseq import safe_save
    except ImportError:
        pass
    else:
        path = safe_save.to_restore(path, no_last)
    return path if os.path.exists(path) else ""


def skip_initialisation() -> Any:
    """A context in which modules are built without memory, where torch has one (2.0 on); else a no-op."""
    import torch

    return torch.device("meta") if hasattr(torch, "set_default_device") else contextlib.nullcontext()


def is_compiling() -> bool:
    """Whether torch.compile is tracing the caller; False with a torch that has none."""
    import torch

    return hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling") and torch.compiler.is_compiling()


@functools.cache
def _autocast_question(device: str) -> Callable[[], bool]:
    import torch

    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 on, where the older functions warn
        return functools.partial(torch.is_autocast_enabled, device)
    return torch.is_autocast_cpu_enabled if device == "cpu" else torch.is_autocast_enabled


def autocasts(device: str = "cpu") -> bool:
    """Whether autocast is on for *device* ("cuda", "cpu")."""
    return _autocast_question(device)()


def no_autocast(tensor: Any) -> Any:
    """A context in which nothing that is computed on *tensor*'s device is lowered to half precision."""
    import torch

    kind = tensor.device.type
    if kind == "meta":  # has no autocast, and the context refuses it
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def autocast_state(device: str) -> Callable[[], Any]:
    """What enters the autocast that is in force now for *device* ("cuda", "cpu") again, as often as it is called."""
    import torch

    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 on
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.get_autocast_cpu_dtype() if device == "cpu" else torch.get_autocast_gpu_dtype()
    return functools.partial(torch.autocast, device, dtype=dtype, enabled=autocasts(device))
