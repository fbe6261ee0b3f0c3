"""The attentions of a decoder layer, as ``--decoder-attn`` chooses them."""

from typing import Optional

from fairseq.modules.quant_noise import quant_noise
from torch import nn

from ..attention import DECODER_ATTENTIONS, AverageAttention
from .base_layer import build_attention, build_self_attention


def decoder_attention(cfg):
    """The entry of ``DECODER_ATTENTIONS`` that *cfg* chooses."""
    return DECODER_ATTENTIONS.get(getattr(cfg, "decoder_attn", None) or "self")


def build_target_attention(cfg, bias: bool = True) -> Optional[nn.Module]:
    """What attends to the target's positions; None where the attention to the source does that, too."""
    kind, dim = decoder_attention(cfg), cfg.decoder.embed_dim
    if kind.positions == "average":
        ffn_dim = cfg.decoder.ffn_embed_dim if getattr(cfg, "average_ffn", False) else None
        average = AverageAttention(dim, ffn_dim, float(cfg.activation_dropout or cfg.relu_dropout or 0))
        for linear in filter(None, (average.fc1, average.fc2, average.gate)):
            quant_noise(linear, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
        return average
    return None if kind.positions is None else build_self_attention(cfg, cfg.decoder, causal=True, bias=bias)


def build_source_attention(cfg, bias: bool = True) -> nn.Module:
    """The attention to the source."""
    return build_attention(cfg, cfg.decoder, kdim=cfg.encoder.embed_dim, bias=bias)
