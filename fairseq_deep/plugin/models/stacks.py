"""Encoder and decoder as fairseq modules, with dictionary, quantisation noise and adaptive softmax."""

from __future__ import annotations

from fairseq import utils
from fairseq.models import FairseqEncoder, FairseqIncrementalDecoder
from fairseq.modules import AdaptiveSoftmax
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from fairseq_deep.core.decoder import Decoder
from fairseq_deep.core.encoder import Encoder
from fairseq_deep.core.stack import Stack


def add_noise(layers: nn.Module, noise: tuple[float, int]) -> None:
    """Add quantisation noise (``--quant-noise-pq`` and its block size) to the matrices of *layers*."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and "residual" not in name.split("."):
            quant_noise(module, *noise)


def _noisy_embedding(stack: nn.Module, cfg) -> nn.Module | None:
    """Add quantisation noise to the layers of *stack*, and return the module that adds it to embeddings."""
    noise = (cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    if noise[0] <= 0:
        return None
    add_noise(stack.layers, noise)
    return quant_noise(nn.Linear(stack.stack.dim, stack.stack.dim, bias=False), *noise)


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
