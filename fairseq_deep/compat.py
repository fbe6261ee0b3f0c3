"""The one place that knows about versions of fairseq and torch: features are tested, version numbers never."""

from typing import Any, Dict, Optional

import torch

FAIRSEQ_ERROR: Optional[BaseException] = None
"""Why fairseq cannot be imported, or None if it can."""

try:
    import fairseq  # noqa: F401
except Exception as error:  # an incompatible fairseq fails in many ways; `fairseq-deep doctor` tells which
    FAIRSEQ_ERROR = error


def load_checkpoint(path: str) -> Dict[str, Any]:
    """A fairseq checkpoint as the dictionary that was saved, on the CPU.

    Loaded safely (no code of the file is run) wherever fairseq is the one that ``third_party/fairseq`` builds;
    otherwise as that fairseq itself would.
    """
    try:
        from fairseq.safe_load import load
    except ImportError:
        return torch.load(path, map_location="cpu")
    return load(path, map_location="cpu")


def skip_initialisation() -> Any:
    """A context in which modules are built without memory, where torch has one (2.0 on); else a no-op."""
    import contextlib

    return torch.device("meta") if hasattr(torch, "set_default_device") else contextlib.nullcontext()
