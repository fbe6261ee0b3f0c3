"""Attention over whole sentences: plain matrix products, and torch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.keep_fp32 import widened


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention weights, at least in fp32."""
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    return torch.softmax(widened(scores), dim=-1)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def fuses_steps(q: Tensor) -> bool:
    """Return whether fused attention is faster for the few queries of a decoding step; on a CPU, it is not."""
    return q.is_cuda


def trains_plainly(q: Tensor, keys: int) -> bool:
    """Return whether plain products are faster in training: on a CPU, especially in bf16, for usual sentences.

    Gradients may be disabled: with recomputation, the first pass has none and must round like the second.
    """
    # sentences of all lengths should share compiled code
    return not q.is_cuda and keys <= 128 and not is_compiling()
