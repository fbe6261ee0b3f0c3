"""The content of a checkpoint, read by fairseq's safe loader, which runs no code; and what that loader rejects."""

import pickletools
import warnings
import zipfile
from typing import Any, BinaryIO

import torch

LARGEST_PICKLE = 1 << 28
"""Maximum size of a pickle, in bytes; the structure of a checkpoint takes some hundred thousand."""
REFUSED = "contains {}, which could run code: fairseq rejects it"
_UNFILLED = "._float_tensor"
"""A buffer of sinusoidal positions that fairseq does not initialise."""


def read_structure(stream: BinaryIO, zipped: bool) -> tuple[Any, list[str]]:
    """Return the object in the checkpoint *stream*, None if it must not be loaded, and unusual findings.

    Raises:
        Exception: the file is corrupt
    """
    from fairseq import safe_load

    problems = _odd_entries(stream) if zipped else []
    if problems:
        return None, problems
    allowed = safe_load.allowed_types()
    load = safe_load.load_weights_only if safe_load.NAMED_SAFE_GLOBALS else safe_load.load_restricted
    stream.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of protocols that torch.save does not write
            state = load(stream, "cpu", allowed)
    except Exception as error:
        refused = safe_load.refused_names(stream, 0, allowed, error)
        if not refused:
            raise
        return None, [REFUSED.format(name) for name in refused]
    return state, _odd_values(state)


def names_in_pickle(stream: BinaryIO) -> list[str]:
    """Return the findings in the pickle in *stream*: names that a checkpoint may not contain.

    Raises:
        ValueError: it is not a pickle
    """
    from fairseq import safe_load

    found = {str(name).replace(" ", ".") for code, name, _ in pickletools.genops(stream) if code.name == "GLOBAL"}
    return [REFUSED.format(name) for name in sorted(found - {*safe_load.allowed_types()})]


def _odd_entries(stream: BinaryIO) -> list[str]:
    """Return the reasons why the zip file in *stream* is not loaded."""
    problems = []
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
    if len({entry.filename for entry in entries}) < len(entries):
        problems.append("it has duplicate names")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        problems.append("entries are compressed, which torch.save does not do")
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        problems.append("it is a TorchScript program: fairseq rejects it")
    sizes = [entry.file_size for entry in entries if entry.filename.endswith("/data.pkl")]
    if sizes and sizes[0] > LARGEST_PICKLE:
        raise ValueError(f"a structure of {sizes[0]:,} bytes")
    return problems


def _odd_values(state: Any) -> list[str]:
    """Return findings in the tensors of the model."""
    model = state.get("model") if isinstance(state, dict) else None
    problems = []
    for name, value in model.items() if isinstance(model, dict) else ():
        if not torch.is_tensor(value):
            continue
        if value.is_meta:
            problems.append(f"{name} has no values")
        elif value.layout != torch.strided or value.is_quantized:
            problems.append(f"{name} is a sparse or quantised tensor, which is not inspected")
        elif value.is_floating_point():
            if not value.isfinite().all() and not name.endswith(_UNFILLED):
                problems.append(f"{name} holds NaN or Inf")
        elif name.endswith((".weight", ".bias")):
            kind = str(value.dtype).removeprefix("torch.")
            problems.append(f"{name} holds whole numbers ({kind}), which are not weights: translation rejects it")
    return problems
