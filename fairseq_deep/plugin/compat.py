"""What depends on the version of fairseq: features are tested, not version numbers."""

import argparse
import os
from collections.abc import Callable
from typing import Any

FAIRSEQ_ERROR: BaseException | None = None
"""Why fairseq cannot be imported, or None if it can."""

try:
    import fairseq  # noqa: F401
except Exception as error:  # an incompatible fairseq fails in many ways; `fairseq-deep doctor` tells which
    FAIRSEQ_ERROR = error


def load_checkpoint(path: str) -> dict[str, Any]:
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


def register_format(ending: str, read: Callable[[str], dict[str, Any]]) -> None:
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


def model_flags(state: dict[str, Any]) -> dict[str, Any]:
    """The flags that the model of a checkpoint was built with."""
    flags = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    return dict(flags if hasattr(flags, "keys") else vars(flags))


def to_restore(folder: str, no_last: bool) -> str:
    """The checkpoint in *folder* that fairseq-train resumes from; "" if it starts a new training.

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
