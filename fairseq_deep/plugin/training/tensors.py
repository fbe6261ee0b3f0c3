"""Operations on lists of tensors, in one launch if torch supports it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.keep_fp32 import HALF


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
    """Copy each of *sources* into its target, in a few launches since torch 2.1."""
    for to, of in alike(targets, sources):
        if hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(to, of)
        else:
            for target, source in zip(to, of):
                target.copy_(source)


def in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of *tensors* in fp32."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in fp32 or better."""
    if tensors[0].dtype not in HALF:
        return list(torch._foreach_norm(tensors))
    try:
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    except TypeError:  # torch before 2.4 sums in fp32, but returns half precision, where a norm overflows
        return [torch.norm(tensor, p=2, dtype=torch.float32) for tensor in tensors]
