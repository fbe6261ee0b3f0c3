"""Transformer encoder layer (Attention Is All You Need, Vaswani et al., 2017).

fairseq's own layer is not used because release 0.12.2 keeps a second, unused copy of each of its matrices among its
parameters and switches to a batch-first fast path that only fairseq's own encoder loop feeds correctly.

With F a sub-layer (self-attention, then feed-forward; Wang et al., 2019, Eq. 3 and 4):

    post-norm  x_{l+1} = LN(x_l + F(x_l))
    pre-norm   x_{l+1} = x_l + F(LN(x_l))
"""

from typing import Dict, Optional

from fairseq import utils
from fairseq.modules import FairseqDropout, LayerNorm, MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

# the unused copies in the encoder layers of fairseq 0.12.2
_DUPLICATES = [f"{matrix}_{part}" for matrix in ("in_proj", "out_proj", "fc1", "fc2") for part in ("weight", "bias")]


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward sub-layers, each with dropout, residual connection and layer norm.

    Args:
        cfg: fairseq's ``TransformerConfig``
    """

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.encoder.embed_dim
        noise, block = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
        name = "TransformerEncoderLayer"  # the name that --retain-dropout-modules knows
        self.embed_dim = dim
        self.normalize_before = cfg.encoder.normalize_before
        self.self_attn = MultiheadAttention(
            dim,
            cfg.encoder.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=True,
            q_noise=noise,
            qn_block_size=block,
        )
        self.self_attn_layer_norm = LayerNorm(dim, export=cfg.export)
        self.dropout_module = FairseqDropout(cfg.dropout, module_name=name)
        self.activation_fn = utils.get_activation_fn(cfg.activation_fn)
        # relu_dropout is what models of old fairseq versions call it
        self.activation_dropout_module = FairseqDropout(
            float(cfg.activation_dropout or cfg.relu_dropout or 0), module_name=name
        )
        self.fc1 = quant_noise(nn.Linear(dim, cfg.encoder.ffn_embed_dim), noise, block)
        self.fc2 = quant_noise(nn.Linear(cfg.encoder.ffn_embed_dim, dim), noise, block)
        self.final_layer_norm = LayerNorm(dim, export=cfg.export)

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
        x, _ = self.self_attn(
            query=x, key=x, value=x, key_padding_mask=encoder_padding_mask, need_weights=False, attn_mask=None
        )
        x = residual + self.dropout_module(x)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        x = residual + self.dropout_module(self.fc2(x))
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Rename the numbered norms of old fairseq versions and drop the unused copies of release 0.12.2."""
        for old, new in (("0", "self_attn_layer_norm"), ("1", "final_layer_norm")):
            for part in ("weight", "bias"):
                key = f"{name}.layer_norms.{old}.{part}"
                if key in state_dict:
                    state_dict[f"{name}.{new}.{part}"] = state_dict.pop(key)
        for duplicate in _DUPLICATES:
            state_dict.pop(f"{name}.{duplicate}", None)
