"""What encoder and decoder layers share: feed-forward sub-layer, norms, dropout, residual connections.

fairseq's own layers are not used: release 0.12.2 keeps a second, unused copy of each matrix of an encoder layer among
its parameters and switches to a batch-first fast path that only fairseq's own loop feeds correctly; and neither has a
place for the residual connections of ``connection.py``. Parameter names are fairseq's.
"""

from typing import List, Tuple

from fairseq import utils
from fairseq.modules import FairseqDropout, LayerNorm
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from ..attention import MultiheadAttention
from ..inits import Connection
from .connection import ResidualConnection


def build_attention(cfg, stack, **options) -> MultiheadAttention:
    """Attention of a layer of *stack* (``cfg.encoder`` or ``cfg.decoder``) to what *options* say."""
    attention = MultiheadAttention(stack.embed_dim, stack.attention_heads, dropout=cfg.attention_dropout, **options)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        quant_noise(getattr(attention, name), cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    return attention


def build_self_attention(cfg, stack, causal: bool, **options) -> MultiheadAttention:
    """Self-attention of a layer of *stack*; *causal*: positions see no later ones."""
    relative = getattr(cfg, "relative_positions", None)
    return build_attention(cfg, stack, relative_positions=relative, causal=causal, **options)


def build_norm(cfg, dim: int, connection: Connection) -> nn.Module:
    """A layer norm, or nothing where the initialisation does without."""
    return LayerNorm(dim, export=cfg.export) if connection.layer_norm else nn.Identity()


SELF = ("self", "self_attn_layer_norm")
CROSS = ("cross", "encoder_attn_layer_norm")
MERGED = ("merged", "encoder_attn_layer_norm")
FFN = ("ffn", "final_layer_norm")


class BaseLayer(nn.Module):
    """The parts that a Transformer layer has in both stacks; with F a sub-layer (Wang et al., 2019, Eq. 3 and 4):

        post-norm  x_{l+1} = LN(x_l + F(x_l))
        pre-norm   x_{l+1} = x_l + F(LN(x_l))

    Args:
        cfg: fairseq's ``TransformerConfig``
        stack: its part for this side
        module_name: the name that ``--retain-dropout-modules`` knows
        sublayers: what its sub-layers are, each with the name of its norm
        connection: their residual connections
    """

    def __init__(self, cfg, stack, module_name: str, sublayers: List[Tuple[str, str]], connection: Connection):
        super().__init__()
        noise, block = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
        dim = stack.embed_dim
        self.embed_dim = dim
        self.normalize_before = stack.normalize_before
        self.sublayers = sublayers
        self.last = len(sublayers) - 1
        self.dropout_module = FairseqDropout(cfg.dropout, module_name=module_name)
        self.activation_fn = utils.get_activation_fn(cfg.activation_fn)
        # relu_dropout is what models of old fairseq versions call it
        self.activation_dropout_module = FairseqDropout(
            float(cfg.activation_dropout or cfg.relu_dropout or 0), module_name=module_name
        )
        self.fc1 = quant_noise(nn.Linear(dim, stack.ffn_embed_dim), noise, block)
        self.fc2 = quant_noise(nn.Linear(stack.ffn_embed_dim, dim), noise, block)
        self.final_layer_norm = build_norm(cfg, dim, connection)
        self.residual = ResidualConnection(connection, dim, len(sublayers))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward sub-layer, with its residual connection and norm (T x B x C)."""
        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        x = self.residual(residual, self.dropout_module(self.fc2(x)), self.last)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x
