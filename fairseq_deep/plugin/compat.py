"""Compatibility with different versions of fairseq, by tests of features instead of version numbers."""

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

FAIRSEQ_ERROR: BaseException | None = None
"""Why fairseq cannot be imported, or None if it can."""

try:
    import fairseq  # noqa: F401
except Exception as error:  # an incompatible fairseq fails in many ways; `fairseq-deep doctor` reports the reason
    FAIRSEQ_ERROR = error


def load_checkpoint(path: str) -> dict[str, Any]:
    """Load a fairseq checkpoint as the saved dictionary, on the CPU.

    Loading runs no code from the file if ``third_party/fairseq`` built the installed fairseq, or if torch is 2.4 or
    newer. With an older torch and another fairseq, the file is unpickled without restrictions, as in that fairseq.
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
    """Have fairseq read checkpoints with the file name suffix *ending* with *read*, a function of the path.

    This has an effect only with the fairseq that ``third_party/fairseq`` builds.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from fairseq import safe_load

        safe_load.FORMATS[ending] = read


def model_flags(state: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a checkpoint's model."""
    flags = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    return dict(flags if hasattr(flags, "keys") else vars(flags))


def to_restore(folder: str, no_last: bool) -> str:
    """Return the checkpoint in *folder* that fairseq-train resumes from; "" if it starts a new run.

    Args:
        no_last: whether the run writes no ``checkpoint_last.pt``
    """
    path = os.path.join(folder, "checkpoint_last.pt")
    try:
        from fairseq import safe_save
    except ImportError:
        pass
    else:
        path = safe_save.to_restore(path, no_last)
    return path if os.path.exists(path) else ""
