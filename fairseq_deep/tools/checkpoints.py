"""Reading and writing of fairseq's checkpoints."""

import argparse
import os
from typing import Any

import torch

from fairseq_deep.errors import UsageError
from fairseq_deep.plugin import compat
from fairseq_deep.plugin.compat import model_flags as model_flags  # re-exported for the tools
from fairseq_deep.runtime import records
from fairseq_deep.runtime.exported import reject_export
from fairseq_deep.tools.output_files import replacing

_USED = ("model", "task", "checkpoint")
"""Sections of a configuration that the tools read."""
_SPACES = ("cfg.model", "cfg.task")
"""Sections that may be an ``argparse.Namespace``."""


def load_checkpoint(path: str) -> dict[str, Any]:
    """Return the fairseq checkpoint at `path`; raise `UsageError` if it is invalid or cannot be read."""
    reject_export(path)
    if os.path.isdir(path):
        names = ("model.safetensors", *records.CHECKPOINTS, "checkpoint_best.pt", "checkpoint_last.pt")
        name = next((name for name in names if os.path.isfile(os.path.join(path, name))), None)
        cure = "give a checkpoint" if name is None else f"give {os.path.join(path, name)}"
        raise UsageError(f"{path} is a directory, not a checkpoint: {cure}")
    try:
        state = compat.load_checkpoint(path)
    except Exception as error:  # a corrupt or rejected file raises any exception
        raise UsageError(f"cannot load {path}: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UsageError(f"{path} is not a fairseq checkpoint (it has no 'model')")
    problem = _odd_part(state)
    if problem:
        raise UsageError(f"{path} is not a complete fairseq checkpoint: {problem}")
    return state


def _odd_part(state: dict[str, Any]) -> str:
    """Return a description of an invalid part of a checkpoint; empty if all parts are valid."""
    config, old, extra = state.get("cfg"), state.get("args"), state.get("extra_state")
    sections = dict(config) if hasattr(config, "keys") else {}
    for name, part in (("extra_state", extra), ("cfg", config), *((f"cfg.{key}", sections.get(key)) for key in _USED)):
        if part is not None and not hasattr(part, "keys") and not (name in _SPACES and hasattr(part, "__dict__")):
            return f"its {name} is a {type(part).__name__}"
    if old is not None and not isinstance(old, argparse.Namespace):
        return f"its args are a {type(old).__name__}"
    if not state["model"]:
        return "its model is empty"
    for key, value in state["model"].items():
        if not isinstance(key, str):
            return f"a parameter has the name {key!r}"
        if torch.is_tensor(value) and (value.layout != torch.strided or value.is_meta or value.is_quantized):
            return f"{key} is a {'meta' if value.is_meta else 'quantised' if value.is_quantized else 'sparse'} tensor"
    return ""


def save_checkpoint(state: dict[str, Any], path: str) -> None:
    """Write a checkpoint atomically."""
    try:
        with replacing(path) as temporary:
            torch.save(state, temporary)
    except RuntimeError as error:  # raised by torch on a full disk
        raise UsageError(f"cannot write {path}: {error}") from error


def check_fairseq() -> None:
    """Raise `UsageError` if fairseq cannot be imported."""
    error = compat.FAIRSEQ_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name == "fairseq":
        raise UsageError("this requires fairseq, which is not installed; see docs/install.md")
    if error is not None:
        raise UsageError(f"this requires fairseq, which cannot be imported ({error}); run 'fairseq-deep doctor'")
