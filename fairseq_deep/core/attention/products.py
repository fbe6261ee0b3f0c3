"""Products of queries, keys and values in whole sentences: plain ones, and torch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_deep.core.compat import is_compiling

from .masks import future_mask


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Attention weights, in fp32 at least."""
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool) -> Tensor:
    if causal:
        bias = future_mask(q.size(2), k.size(2), q)
    return torch.matmul(F.dropout(attention_weights(q, k, bias).to(q.dtype), dropout), v)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def fuses_steps(q: Tensor) -> bool:
    """Whether the fused form is the faster one for the few queries of a decoding step; on a CPU, plain products are."""
    return q.is_cuda


def trains_plainly(q: Tensor, keys: int) -> bool:
    """Whether plain products are the faster form in training: on a CPU, most of all in bf16, for usual sentences.

    Gradients may be off: with recomputation the first pass has none, and is to round as the second one does.
    """
    # compiled, sentences of all lengths are to share code
    return not q.is_cuda and keys <= 128 and not is_compiling()
