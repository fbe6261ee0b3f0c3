"""Operations on lists of tensors, in one launch if torch supports it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def alike(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Split *lists* of equal length into parts that have one device and one type each.

    On a GPU, torch processes mixed lists one by one, and assumes that all targets of a copy have the first's type.
    """
    parts: dict[Any, list[Any]] = {}
    for entry in zip(*lists):
        parts.setdefault(tuple((tensor.device, tensor.dtype) for tensor in entry), []).append(entry)
    for entries in parts.values():
        yield [list(tensors) for tensors in zip(*entries)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of *sources* into its target, in a few launches."""
    for to, of in alike(targets, sources):
        torch._foreach_copy_(to, of)


def in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of *tensors* in fp32."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    copy_all(copies, tensors)
    return copies
