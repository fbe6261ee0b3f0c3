"""Transformer encoder layer (Attention Is All You Need, Vaswani et al., 2017)."""

from typing import Dict, Optional

from torch import Tensor

from ..inits import PLAIN, Connection
from .base_layer import FFN, SELF, BaseLayer, build_norm, build_self_attention

# the unused copies in the encoder layers of fairseq 0.12.2
_DUPLICATES = [f"{matrix}_{part}" for matrix in ("in_proj", "out_proj", "fc1", "fc2") for part in ("weight", "bias")]


class EncoderLayer(BaseLayer):
    """Self-attention and feed-forward sub-layers, each with dropout, residual connection and layer norm.

    Args:
        cfg: fairseq's ``TransformerConfig``
        connection: the residual connections
    """

    def __init__(self, cfg, connection: Connection = PLAIN):
        super().__init__(cfg, cfg.encoder, "TransformerEncoderLayer", [SELF, FFN], connection)
        self.self_attn = build_self_attention(cfg, cfg.encoder, causal=False)
        self.self_attn_layer_norm = build_norm(cfg, self.embed_dim, connection)

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor]) -> Tensor:
        """Run the layer.

        Args:
            x: T x B x C
            encoder_padding_mask: B x T, true where *x* is padding, or None if nothing is

        Returns:
            T x B x C
        """
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, key_padding_mask=encoder_padding_mask)
        x = self.residual(residual, self.dropout_module(x), 0)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        return self.feed_forward(x)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Rename the numbered norms of old fairseq versions and drop the unused copies of release 0.12.2."""
        for old, new in (("0", "self_attn_layer_norm"), ("1", "final_layer_norm")):
            for part in ("weight", "bias"):
                key = f"{name}.layer_norms.{old}.{part}"
                if key in state_dict:
                    state_dict[f"{name}.{new}.{part}"] = state_dict.pop(key)
        for duplicate in _DUPLICATES:
            state_dict.pop(f"{name}.{duplicate}", None)
