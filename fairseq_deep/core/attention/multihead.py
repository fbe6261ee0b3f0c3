"""Multi-head attention, with optional relative positions.

Attention Is All You Need, Vaswani et al., 2017, Section 3.2:

    head = softmax(q k^T / sqrt(D)) v          Eq. (1), for each of H heads of width D = C / H

Self-Attention with Relative Position Representations, Shaw et al., 2018, adds a learned vector to each key (Eq. 4) and,
with ``--relative-values``, to each value (Eq. 3); the parameter counts of Xu et al., 2024, only include keys:

    score(i, j) = q_i (k_j + a_(j - i))^T / sqrt(D),    head_i = sum_j w_ij (v_j + b_(j - i))

Names here: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` as in fairseq; ``relative_keys`` holds the vectors a and
``relative_values`` the vectors b, which all heads share: one for each distance -K ... K, clipped, or -(K+1) ... 0 if no
position sees later ones.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.dropout import Dropout
from fairseq_deep.core.native.steps import NativeAttention
from fairseq_deep.core.norms import RmsNorm, make_norm
from fairseq_deep.core.stack import Stack

from .cache import SourceCache, TargetCache, by_column
from .context import LayerContext
from .groups import as_bias, as_heads, as_queries
from .joined import join_projections
from .masks import future_mask, padding_bias
from .products import attend_fused, attention_weights, fuses_steps, trains_plainly
from .relative import find_distances, relative_values, score_distances
from .rotary import RotaryPositions
from .value_residual import ValueResidual


class MultiheadAttention(nn.Module):
    """Self-attention of T x B x C queries, or their attention to a memory.

    Args:
        stack: width C, number of heads H, dropout, and the options of attentions; positions and the values of the first
            layer are for self-attention only
        kdim: width of the memory; None for self-attention
        causal: no position sees later ones, which then need no relative positions
        bias: whether the four projections have a bias
    """

    kernels = NativeAttention

    def __init__(self, stack: Stack, kdim: int | None = None, causal: bool = False, bias: bool = True):
        super().__init__()
        dim, own = stack.dim, kdim is None
        self.num_heads, self.kv_heads = stack.heads, stack.kv_heads or stack.heads
        self.head_dim = dim // stack.heads
        self.dropout_module = Dropout(stack.attention_dropout, "MultiheadAttention")
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(kdim or dim, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(kdim or dim, self.kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.of_memory = not own
        self.idle: tuple[str, ...] = ()  # matrices that generation does not use: qkv_proj contains them
        self.qkv_proj: nn.Linear | None = None  # in generation, the three joined
        self.relative_keys: nn.Parameter | None = None
        self.relative_values: nn.Parameter | None = None
        self.farthest = 0
        if own and stack.relative_positions is not None:
            # K+2 vectors if causal: the last is for all distances beyond K
            self.farthest = stack.relative_positions + (1 if causal else 0)
            rows = self.farthest + 1 + (0 if causal else self.farthest)
            self.relative_keys = nn.Parameter(torch.empty(rows, self.head_dim))
            if stack.relative_values:
                self.relative_values = nn.Parameter(torch.empty(rows, self.head_dim))
        rotates = own and stack.positions == "rotary"
        self.rotary = RotaryPositions(self.head_dim, stack.max_positions) if rotates else None
        self.q_norm, self.k_norm = (RmsNorm(self.head_dim) if stack.qk_norm else None for _ in "qk")
        gates = {None: 0, "heads": stack.heads, "features": dim}[stack.attention_gate]
        self.gate = nn.Linear(dim, gates, bias=False) if gates else None
        self.output_norm = make_norm(stack) if stack.sub_norm else None
        self.value_residual = ValueResidual() if own and stack.value_residual else None
        self.own_cache = TargetCache() if own else None
        self.memory_cache = None if own else SourceCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like fairseq: Xavier, with gain 1/sqrt(2) for queries, keys and values of the same width."""
        same = self.k_proj.in_features == self.q_proj.in_features
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5 if same else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        for vectors in (self.relative_keys, self.relative_values):
            if vectors is not None:
                nn.init.xavier_uniform_(vectors)

    def forward(
        self, query: Tensor, context: LayerContext, need_weights: bool = False, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: T x B x C
            context: inputs of the layer. Self-attention reads its padding and mask, or in a step of incremental
                decoding its *step*, and appends to the keys and values of its cache. Attention to the memory computes
                the keys and values of the memory at the first step.
            need_weights: also return the attention weights
            added: T x B x C, added to the output of the heads before the output projection

        Returns:
            T x B x C, and the weights (H x B x T x S, fp32) or None
        """
        beam, place, attn_mask, causal = 1, None, None, False
        if self.of_memory:
            q = self.q_proj(query)
            key, value, bias = self.read_memory(q, context)
            q = self._split_heads(q, key.size(0))
            q = q if self.q_norm is None else self.q_norm(q)
        else:
            mask, place = (None, None) if context.step is None else (context.step.mask, context.step.place)
            beam, attn_mask, causal = 1 if mask is None else mask.size(2), context.mask, context.causal
            q, key, value = self._own(query, context, mask, place)
            bias = self._padding_bias(context.padding, q) if mask is None else mask.to(q.dtype)
        decoding = context.cache is not None
        if causal and (bias is not None or need_weights or decoding or self.relative_keys is not None):
            attn_mask, causal = future_mask(q.size(2), key.size(2), q), False
        if attn_mask is not None:
            bias = attn_mask.to(q.dtype) if bias is None else bias + attn_mask.to(q.dtype)
        distances: Tensor | None = None
        if self.relative_keys is not None:
            distances = find_distances(self, q.size(2), key.size(2), beam, q.device, place)
            relative = score_distances(self, q, distances)
            bias = relative if bias is None else relative + bias
        x, weights = self._groups(q, key, value, bias, distances, need_weights, decoding, causal)
        x = self._per_hypothesis(x, query.size(0)).permute(3, 0, 1, 2, 4).reshape(query.shape).contiguous()
        if weights is not None:
            weights = self._per_hypothesis(weights, query.size(0)).permute(2, 0, 1, 3, 4).flatten(1, 2)
        return self.project_output(x, query, added), weights

    def project_output(self, x: Tensor, query: Tensor, added: Tensor | None) -> Tensor:
        """Project the output *x* of the heads, T x B x C; see :meth:`forward`."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(query)).unflatten(-1, (self.num_heads, -1))
            x = (x.unflatten(-1, (self.num_heads, -1)) * gate).flatten(-2)
        if added is not None:
            x = x + added
        return self.out_proj(x if self.output_norm is None else self.output_norm(x))

    def _groups(
        self, q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *others
    ) -> tuple[Tensor, Tensor | None]:
        """Compute :meth:`_heads`, whose arguments these are, also where heads share keys and values."""
        count = self.num_heads // self.kv_heads
        if count == 1:
            return self._heads(q, key, value, bias, *others)
        if others[-1] or self.relative_keys is not None:  # a causal mask and distances depend on the number of queries
            return self._heads(q, *(each.repeat_interleave(count, dim=1) for each in (key, value)), bias, *others)
        x, weights = self._heads(as_queries(q, count), key, value, as_bias(bias, count), *others)
        return as_heads(x, count), None if weights is None else as_heads(weights, count)

    def _heads(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        distances: Tensor | None,
        need_weights: bool,
        decoding: bool,
        causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the heads (B x H x T x D), and their weights (B x H x T x S) if needed."""
        dropout, of_values = self.dropout_module.active, self.relative_values
        fast = self.dropout_module.fast and dropout > 0 and not is_compiling()
        plain = fast or (decoding and not fuses_steps(q)) or (self.training and trains_plainly(q, key.size(2)))
        if not (plain or need_weights) and of_values is None:
            return attend_fused(q, key, value, bias, dropout, causal), None
        weights = attention_weights(q, key, future_mask(q.size(2), key.size(2), q) if causal else bias)
        dropped = self.dropout_module(weights.to(q.dtype))
        x = torch.matmul(dropped, value)
        if of_values is not None:
            x = x + relative_values(self, dropped, distances)
        return x, weights.float() if need_weights else None

    def _split_heads(self, x: Tensor, sources: int) -> Tensor:
        """Map T x B x C to sources x H x (B/sources * T) x D: hypotheses of a source query the same keys."""
        x = x.view(x.size(0), sources, x.size(1) // sources, -1, self.head_dim)
        return x.permute(1, 3, 2, 0, 4).flatten(2, 3)

    def _per_hypothesis(self, x: Tensor, length: int) -> Tensor:
        """Map sources x H x (beam * T) x D to sources x beam x H x T x D."""
        return x.view(x.size(0), x.size(1), -1, length, x.size(3)).transpose(1, 2)

    def _own(
        self, query: Tensor, context: LayerContext, mask: Tensor | None, place: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and keys and values (B x H x S x D) of all positions so far.

        With *mask* and *place* (see :class:`DecodingStep`), B is the number of sentences, and T and S count the queries
        and keys of all hypotheses.
        """
        batch = query.size(1) if mask is None else mask.size(0)
        q, k, v, kv = self._project(query, batch)
        if context.values is not None:
            v, kv = context.values.mix(v, self.value_residual), None
        if self.rotary is not None or self.q_norm is not None:
            position, beam = None, 1 if mask is None else mask.size(2)
            if place is not None:
                position = torch.div(place[:1], beam, rounding_mode="floor")
            elif context.cache is not None:
                position = self.own_cache.length(context.cache) // beam
            q, k, kv = *self.norm_and_rotate(q, k, position), None
        if context.cache is None:
            return q, k, v
        kv = self.own_cache(context.cache, torch.stack([k, v]) if kv is None else kv, place)
        return q, kv[0], kv[1]

    def _project(self, query: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values (B x H x T x D each), and keys and values as one tensor if one exists."""
        if self.qkv_proj is None or torch.is_grad_enabled():
            q, k, v = self.q_proj(query), self.k_proj(query), self.v_proj(query)
        elif self.kv_heads == self.num_heads:
            qkv = self.qkv_proj(query).view(query.size(0), batch, -1, 3, self.num_heads, self.head_dim)
            qkv = qkv.permute(3, 1, 4, 2, 0, 5).flatten(3, 4)
            return qkv[0], qkv[1], qkv[2], qkv[1:]
        else:
            sizes = [heads * self.head_dim for heads in (self.num_heads, self.kv_heads, self.kv_heads)]
            q, k, v = self.qkv_proj(query).split(sizes, dim=-1)
        return self._split_heads(q, batch), self._split_heads(k, batch), self._split_heads(v, batch), None

    def norm_and_rotate(self, q: Tensor, k: Tensor, position: int | Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply QK-norm and rotary positions if the attention has them; *position*: see :class:`RotaryPositions`."""
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, position), self.rotary(k, position)
        return q, k

    def read_memory(self, like: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return keys and values (sources x H x S x D) of the memory, and the bias that hides padding.

        Incremental decoding computes them at the first step; *like* gives the type of the bias.
        """
        saved = None if context.cache is None else self.memory_cache(context.cache)
        if saved is not None:
            return saved
        key, value = self.project_memory(context.memory)
        bias = self._padding_bias(context.memory_padding, like)
        if context.cache is not None:
            key, value = by_column(key), None if value is None else value.contiguous()
            self.memory_cache.keep(context.cache, key, value, bias)
        return key, value, bias

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return keys and values (sources x H x S x D) of *memory* (S x sources x kdim)."""
        sources = memory.size(1)
        key = self._split_heads(self.k_proj(memory), sources)
        key = key if self.k_norm is None else self.k_norm(key)
        return key, self._split_heads(self.v_proj(memory), sources)

    def _padding_bias(self, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return a bias that hides the keys under *padding*: B x 1 x 1 x S. *padding* may be such a bias already."""
        if padding is None:
            return None
        return padding_bias(padding, q.dtype) if padding.dim() == 2 else padding.to(q.dtype)

    def make_generation_fast_(self, **_) -> None:
        """Join projections for generation; also called by fairseq."""
        parts = [self.q_proj, self.k_proj, self.v_proj]
        if self.of_memory or self.qkv_proj is not None or not all(type(part) is nn.Linear for part in parts):
            return
        self.qkv_proj = join_projections(self)
        self.idle = ("q_proj", "k_proj", "v_proj")
