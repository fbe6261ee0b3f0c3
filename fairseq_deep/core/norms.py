"""Norms of layers and stacks: LayerNorm or RMSNorm (``--norm``), or a LayerNorm per language (``--language-norm``).

Layer Normalization, Ba et al., 2016, and Root Mean Square Layer Normalization, Zhang and Sennrich, NeurIPS 2019, Eq. 4:

    LN(x)  = (x - mean(x)) / sqrt(var(x) + eps) * g + b
    RMS(x) = x / sqrt(mean(x^2) + eps) * g

over the features of a position. Statistics are at least in fp32. LaLN has g_t and b_t per target language t (Improving
Massively Multilingual Neural Machine Translation and Zero-Shot Translation, Zhang et al., ACL 2020).

Names here: ``weight`` is g, ``bias`` is b; in LaLN, their rows are g_t and b_t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .keep_fp32 import widened
from .stack import Stack

FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")  # older releases may compute the squares in fp16


class RmsNorm(nn.Module):
    """RMS(x) over the last dimension.

    Args:
        dim: size of the last dimension
        eps: added to the mean of squares
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (... x C)."""
        if x.dtype == self.weight.dtype and (FUSED or x.dtype != torch.float16):
            return F.rms_norm(x, (self.dim,), self.weight, self.eps)
        wide = widened(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class LanguageNorm(nn.Module):
    """LN_t(x) over the last dimension, with gains and biases of the target language t (LaLN).

    Args:
        languages: number of languages; one more row is for sentences without a tag
        dim: size of the last dimension
        eps: added to the variance
    """

    def __init__(self, languages: int, dim: int, eps: float = 1e-5):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(languages + 1, dim))
        self.bias = nn.Parameter(torch.zeros(languages + 1, dim))

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        """Normalise x (T x B x C); *languages*: indices of the languages, B, or B x 1 for B x T x C."""
        weight, bias = (F.embedding(languages, rows) for rows in (self.weight, self.bias))
        return torch.addcmul(bias, F.layer_norm(x, (self.dim,), eps=self.eps), weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} x {self.dim}, eps={self.eps}"


def make_norm(stack: Stack, dim: int | None = None) -> nn.Module:
    """Build a norm of the stack's kind, over *dim* features (default: its width)."""
    dim = stack.dim if dim is None else dim
    if stack.language_norm:
        return LanguageNorm(stack.languages, dim)
    return RmsNorm(dim) if stack.norm == "rms" else nn.LayerNorm(dim)


def normalise(norm: nn.Module, x: Tensor, languages: Tensor | None) -> Tensor:
    """Apply *norm* to x; *languages*: used by a :class:`LanguageNorm`."""
    return norm(x, languages) if isinstance(norm, LanguageNorm) else norm(x)
