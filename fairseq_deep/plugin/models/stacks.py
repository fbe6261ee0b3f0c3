"""Encoder and decoder as fairseq modules, with dictionary, quantisation noise and adaptive softmax."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.models import FairseqEncoder, FairseqIncrementalDecoder
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor, nn

from fairseq_deep.core.decoder import Decoder
from fairseq_deep.core.encoder import Encoder
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack


def add_noise(module: nn.Module, share: float, block: int) -> nn.Module:
    """Add quantisation noise to the matrices of *module*: in training, blocks of weights are 0 at random.

    Training with Quantization Noise for Extreme Model Compression, Fan et al., ICLR 2021. fairseq's function stores the
    weights with noise in the parameters, where zeros add up over passes unless each has new copies of fp32 weights.

    Args:
        share: the probability that a block is 0 (``--quant-noise-pq``)
        block: number of its weights, in a row (``--quant-noise-pq-block-size``)

    Raises:
        UsageError: the share or the size of blocks does not fit
    """
    if not share < 1:
        raise UsageError(f"--quant-noise-pq {share} must be less than 1: lower it")
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and "residual" not in name.split("."):
            if block < 1 or part.in_features % block:
                raise UsageError(
                    f"--quant-noise-pq-block-size {block} must divide all widths ({part.in_features}): change it"
                )
            part.forward = functools.partial(_run_noisy, part, share, block)
    return module


def _run_noisy(linear: nn.Linear, share: float, block: int, x: Tensor) -> Tensor:
    weight = linear.weight
    if linear.training:
        dropped = torch.zeros(weight.numel() // block, device=weight.device).bernoulli_(share).bool()
        noisy = weight.detach().masked_fill(dropped.repeat_interleave(block).view_as(weight), 0) / (1 - share)
        weight = noisy + (weight - weight.detach())  # all weights have a gradient
    return F.linear(x, weight, linear.bias)


def _noisy_embedding(stack: nn.Module, cfg) -> nn.Module | None:
    """Add quantisation noise to the layers of *stack*, and return the module that adds it to embeddings."""
    noise = (cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    if noise[0] <= 0:
        return None
    add_noise(stack.layers, *noise)
    return add_noise(nn.Linear(stack.stack.dim, stack.stack.dim, bias=False), *noise)


class DeepTransformerEncoder(Encoder, FairseqEncoder):
    """:class:`Encoder` with fairseq's dictionary.

    Args:
        stacks: descriptions of both stacks, by side
        dictionary, embed_tokens: of the source
        cfg: fairseq's configuration
    """

    def __init__(self, stacks: dict[str, Stack], dictionary, embed_tokens: nn.Embedding, cfg):
        super().__init__(stacks["encoder"], embed_tokens, stacks["decoder"])
        self.dictionary = dictionary
        self.quant_noise = _noisy_embedding(self, cfg)

    def embed(
        self, tokens: Tensor, embedded: Tensor | None = None, languages: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, embedding = super().embed(tokens, embedded, languages)
        return x if self.quant_noise is None else self.quant_noise(x), embedding


class DeepTransformerDecoder(Decoder, FairseqIncrementalDecoder):
    """:class:`Decoder` with fairseq's dictionary and its adaptive softmax.

    Args:
        stacks, cfg: see :class:`DeepTransformerEncoder`
        dictionary, embed_tokens: of the target
    """

    onnx_trace = False

    def __init__(self, stacks: dict[str, Stack], dictionary, embed_tokens: nn.Embedding, cfg):
        super().__init__(stacks["decoder"], embed_tokens)
        self.dictionary = dictionary
        self.quant_noise = _noisy_embedding(self, cfg)
        self.adaptive_softmax = None
        if cfg.adaptive_softmax_cutoff is not None:
            self.output_projection = None
            self.adaptive_softmax = AdaptiveSoftmax(
                len(dictionary),
                self.stack.output_dim or self.stack.dim,
                utils.eval_str_list(cfg.adaptive_softmax_cutoff, type=int),
                dropout=cfg.adaptive_softmax_dropout,
                factor=cfg.adaptive_softmax_factor,
                tie_proj=cfg.tie_adaptive_proj,
            )

    def look_up(self, tokens: Tensor) -> Tensor:
        x = super().look_up(tokens)
        return x if self.quant_noise is None else self.quant_noise(x)

    def output_layer(self, features: Tensor, **_) -> Tensor:
        """Return scores of all tokens; with an adaptive softmax, return *features*."""
        return features if self.adaptive_softmax is not None else super().output_layer(features)
