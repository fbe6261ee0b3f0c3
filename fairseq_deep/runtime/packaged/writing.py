"""Writing of packaged models: weights, settings, dictionaries, merges, card and checksums."""

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.errors import UsageError, one_line

from .config import FORMAT, HUGGINGFACE, TASK, VERSION, check_config, model_settings
from .folder import CONFIG, WEIGHTS, write_sums
from .reading import TYPES

UNFILLED = "._float_tensor"
"""A buffer of sinusoidal positions that fairseq does not initialise."""


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of a package.

    Attributes:
        config: see :func:`make_config`
        tensors: tensors by name, except tensors tied to another one
        texts: dictionaries, sub-words and card by file name
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    texts: dict[str, bytes]


def make_config(name: str, licence: str, flags: argparse.Namespace, tied: dict[str, str], **sections) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        flags: flags of the model, filled by its architecture
        tied: {name of a tensor: name of the tensor that it is tied to}
        sections: "task", "text", "search", "criterion" and "made_with"

    Raises:
        ValueError: the model cannot be packaged; the message is for the user
    """
    given, known = vars(flags), model_settings()
    for flag in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        if given.get(flag):
            raise ValueError(f"it has --{flag.replace('_', '-')}, which packages do not support")
    arch = given["arch"] if "transformer" in given["arch"] else "deep_transformer"  # a label: the settings are complete
    model = {key: given[key] for key in sorted(known) if key in given}
    config = {**HUGGINGFACE, "format": FORMAT, "version": VERSION, "name": name, "licence": licence,
              "arch": arch, **sections, "model": model, "tied": tied}  # fmt: skip
    config["task"] = {key: sections["task"][key] for key in TASK}
    check_config(config)
    return config


def make_tensors(
    model: nn.Module, stored: dict[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, and {tied name: name of its tensor}.

    Args:
        model: the model with its weights; converted to *dtype* in place
        stored: the weights in a checkpoint, with their stored types
        dtype: type to store floats in, except tensors that the model keeps in fp32; None: as in *stored*

    Raises:
        ValueError: a weight is not finite, or has an unsupported type; the message is for the user
    """
    check_finite(model.state_dict(), "holds NaN or Inf")
    if dtype is not None:
        stored = model.to(dtype).state_dict()
        check_finite(stored, f"is beyond the range of {dtype}")
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        owner = owners.setdefault((value.data_ptr(), value.shape, value.stride()) if value.numel() else name, name)
        if owner != name:
            tied[name] = owner
        elif str(stored[name].dtype) not in (f"torch.{kind}" for kind in TYPES.values()):
            raise ValueError(f"{name} has the type {stored[name].dtype}, which packages do not support")
        elif name.endswith(UNFILLED):
            tensors[name] = torch.zeros_like(stored[name])
        else:
            tensors[name] = value.to(stored[name].dtype).contiguous()
    return tensors, tied


def check_finite(weights: Mapping[str, Tensor], problem: str) -> None:
    """Raise `ValueError` with the name of a weight that is not finite, and *problem*."""
    for name, value in weights.items():
        if not name.endswith(UNFILLED) and not torch.isfinite(value).all():
            raise ValueError(f"{name} {problem}")


def write(folder: str, content: Content) -> None:
    """Write a package to the empty *folder*.

    Raises:
        UsageError: a file cannot be written
    """
    from safetensors.torch import save_file

    settings = json.dumps(content.config, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        save_file(content.tensors, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})
        for name, text in {**content.texts, CONFIG: f"{settings}\n".encode()}.items():
            with open(os.path.join(folder, name), "wb") as stream:
                stream.write(text)
        # safetensors creates the file with private permissions
        shutil.copymode(os.path.join(folder, CONFIG), os.path.join(folder, WEIGHTS))
        write_sums(folder)
    except UsageError:
        raise
    except Exception as error:  # safetensors has its own exceptions for a full disk
        raise UsageError(f"{folder} cannot be written ({one_line(error)})") from error
