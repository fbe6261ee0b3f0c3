"""Functions of the kernels: normalisers and candidates of beam search, sums over layers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .library import load
from .packed import pointer


def log_normalisers(rows: Tensor) -> Tensor:
    """Return log sum exp of each row of a contiguous matrix."""
    y = torch.empty(rows.size(0))
    sizes = map(ctypes.c_int64, rows.shape)
    load().log_normalisers(pointer(rows), *sizes, pointer(y), ctypes.c_int64(torch.get_num_threads()))
    return y


def best_candidates(logits: Tensor, offsets: Tensor, beam: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best candidates of each sentence; see :func:`fairseq_deep.core.search.candidates.best_candidates`.

    Args:
        logits, offsets: contiguous, in fp32
    """
    words, sentences = logits.size(1), offsets.size(0)
    scores, found = torch.empty(sentences, count), torch.empty(2, sentences, count, dtype=torch.int64)
    chosen, ranks = found.unbind(0)
    sizes = map(ctypes.c_int64, (sentences, beam, words, count))
    load().best_candidates(pointer(logits), pointer(offsets), *sizes, *map(pointer, (scores, chosen, ranks)),
                           ctypes.c_int64(torch.get_num_threads()))  # fmt: skip
    return scores, chosen, ranks


def weighted_sum(weights: Tensor, entries: list[Tensor]) -> Tensor:
    """Return sum_k w_k h_k over K *entries* of one shape; *weights*: K numbers in fp32."""
    entries, weights = [entry.float().contiguous() for entry in entries], weights.float().contiguous()
    y = torch.empty_like(entries[0])
    places = (ctypes.c_void_p * len(entries))(*(entry.data_ptr() for entry in entries))
    sizes = map(ctypes.c_int64, (len(entries), y.numel()))
    load().weighted_sum(places, pointer(weights), *sizes, pointer(y))
    return y
