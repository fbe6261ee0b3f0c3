"""Operations on many tensors at once, where torch has them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.keep_fp32 import HALF


def alike(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The *lists*, of equal length, in parts of one device and one type each.

    On a GPU torch takes mixed lists tensor by tensor, and those that it copies to in the type of the first.
    """
    parts: dict[Any, list[Any]] = {}
    for entry in zip(*lists):
        parts.setdefault(tuple((tensor.device, tensor.dtype) for tensor in entry), []).append(entry)
    for entries in parts.values():
        yield [list(tensors) for tensors in zip(*entries)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of *sources* into its target, in a few launches from torch 2.1 on."""
    for to, of in alike(targets, sources):
        if hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(to, of)
        else:
            for target, source in zip(to, of):
                target.copy_(source)


def in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of *tensors* in fp32."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each, in fp32 or better."""
    if tensors[0].dtype not in HALF:
        return list(torch._foreach_norm(tensors))
    try:
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    except TypeError:  # torch before 2.4 sums in fp32, but returns half precision, where a norm overflows
        return [torch.norm(tensor, p=2, dtype=torch.float32) for tensor in tensors]
