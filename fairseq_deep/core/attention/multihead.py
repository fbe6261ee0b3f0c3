"""Multi-head attention, with optional relative positions.

Attention Is All You Need, Vaswani et al., 2017, Section 3.2:

    head = softmax(q k^T / sqrt(D)) v          Eq. (1), for each of H heads of width D = C / H

Self-Attention with Relative Position Representations, Shaw et al., 2018, adds a learned vector to each key (its Eq. 4;
and, if asked to, to each value, Eq. 3; the parameter counts of Xu et al., 2024, have keys only):

    score(i, j) = q_i (k_j + a_(j - i))^T / sqrt(D),    head_i = sum_j w_ij (v_j + b_(j - i))

Names here: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` as in fairseq; ``relative_keys`` holds the vectors a and
``relative_values`` the vectors b, which all heads share: those of the distances -K ... K, clipped, or where no position
sees later ones, of -(K+1) ... 0.
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.dropout import fast_dropout
from fairseq_deep.core.stack import Stack

from .beams import DecodingStep
from .cache import SourceCache, TargetCache
from .joined import join_projections
from .masks import future_mask, padding_bias
from .relative import all_distances, relative_scores, relative_values
from .steps import by_column, step_rows, takes_rows


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Attention weights, in fp32 at least."""
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool) -> Tensor:
    if causal:
        bias = future_mask(q.size(2), k.size(2), q)
    return torch.matmul(F.dropout(_weights(q, k, bias).to(q.dtype), dropout), v)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def _fuses_steps(q: Tensor) -> bool:
    """Whether the fused form is the faster one for the few queries of a decoding step; on a CPU, plain products are."""
    return q.is_cuda


def _trains_plainly(q: Tensor, keys: int) -> bool:
    """Whether plain products are the faster form in training: on a CPU, most of all in bf16, for usual sentences.

    Gradients may be off: with recomputation the first pass has none, and is to round as the second one does.
    """
    # compiled, sentences of all lengths are to share code
    return not q.is_cuda and keys <= 128 and not is_compiling()


class MultiheadAttention(nn.Module):
    """Attention of T x B x C queries to themselves and what came before, or to a memory.

    Args:
        dim: width C
        num_heads: number of heads H, a divisor of *dim*
        kdim: width of the memory; None for self-attention
        dropout: probability of dropout on the attention weights
        bias: whether the four projections have one
        relative_positions: the clipping distance K of relative positions (self-attention only); None for none
        relative_values: they have vectors for the values, too
        causal: no position sees later ones, so that only they need relative positions
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        relative_positions: int | None = None,
        relative_values: bool = False,
        causal: bool = False,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.retain_dropout = False
        self.fast_dropout = False  # of --fast-dropout
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(kdim or dim, dim, bias=bias)
        self.v_proj = nn.Linear(kdim or dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.of_memory = kdim is not None
        self.idle: tuple[str, ...] = ()  # matrices that generation does not use: they have become parts of qkv_proj
        self.qkv_proj: nn.Linear | None = None  # in generation, the three in one
        self.relative_keys: nn.Parameter | None = None
        self.relative_values: nn.Parameter | None = None
        self.farthest = 0
        if relative_positions is not None:
            # K+2 vectors where none looks ahead: the last is of all that is farther than K
            self.farthest = relative_positions + 1 if causal else relative_positions
            rows = self.farthest + 1 + (0 if causal else self.farthest)
            self.relative_keys = nn.Parameter(torch.empty(rows, self.head_dim))
            if relative_values:
                self.relative_values = nn.Parameter(torch.empty(rows, self.head_dim))
        self.own_cache = None if self.of_memory else TargetCache()
        self.memory_cache = SourceCache() if self.of_memory else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """fairseq's start values: Xavier, with gain 1/sqrt(2) for queries, keys and values of one width."""
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
        self,
        query: Tensor,
        memory: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = False,
        added: Tensor | None = None,
        step: DecodingStep | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: T x B x C
            memory: S x B x kdim; None for self-attention
            key_padding_mask: B x S, true where the keys are padding; or what :func:`padding_bias` makes of that
            attn_mask: added to the scores, T x S or B x 1 x T x S
            incremental_state: caches of all attentions. Self-attention appends to its keys and values; those of a
                memory are computed at the first step.
            need_weights: also return the attention weights
            added: T x B x C, added to what the heads give before the output projection
            step: (self-attention, in a step of incremental decoding) the output of :class:`SharedBeamState`. Its mask
                replaces *key_padding_mask* and *attn_mask*.
            causal: (self-attention) no position sees later ones; without an *attn_mask* that says so

        Returns:
            T x B x C, and the weights (H x B x T x S, fp32) or None
        """
        usual = not need_weights and attn_mask is None and incremental_state is not None
        if usual and not _fuses_steps(query) and takes_rows(self, query, memory, step):
            return step_rows(self, query, memory, key_padding_mask, incremental_state, added, step), None
        beam = 1
        if memory is None:
            mask = None if step is None else step.mask
            beam = 1 if mask is None else mask.size(2)
            place = None if step is None else step.place
            q, key, value = self._own(query, incremental_state, mask, place)
            bias = self._padding_bias(key_padding_mask, q) if mask is None else mask.to(q.dtype)
        else:
            q = self.q_proj(query)
            key, value, bias = self._of_memory(q, memory, key_padding_mask, incremental_state)
            q = self._split_heads(q, key.size(0))
        decoding = incremental_state is not None
        if causal and (bias is not None or need_weights or decoding or self.relative_keys is not None):
            attn_mask, causal = future_mask(q.size(2), key.size(2), q), False
        if attn_mask is not None:
            bias = attn_mask.to(q.dtype) if bias is None else bias + attn_mask.to(q.dtype)
        distances: Tensor | None = None
        if self.relative_keys is not None:
            if decoding:
                place = None if step is None else step.place
                distances = self._distances(q.size(2), key.size(2), beam, q.device, place)
            relative = self._relative_scores(q, distances)
            bias = relative if bias is None else relative + bias
        x, weights = self._heads(q, key, value, bias, distances, need_weights, decoding, causal)
        x = self._per_hypothesis(x, query.size(0)).permute(3, 0, 1, 2, 4).reshape(query.shape).contiguous()
        if weights is not None:
            weights = self._per_hypothesis(weights, query.size(0)).permute(2, 0, 1, 3, 4).flatten(1, 2)
        if added is not None:
            x = x + added
        return self.out_proj(x), weights

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
        """Outputs of the heads (B x H x T x D), and their weights (B x H x T x S) if they are needed."""
        dropout = self.dropout if self.training or self.retain_dropout else 0.0
        of_values = self.relative_values
        fast = self.fast_dropout and dropout > 0
        if not need_weights and of_values is None and (not decoding or _fuses_steps(q)) and not fast:
            if self.training and _trains_plainly(q, key.size(2)):
                return _attend_plainly(q, key, value, bias, dropout, causal), None
            return _attend(q, key, value, bias, dropout, causal), None
        weights = _weights(q, key, future_mask(q.size(2), key.size(2), q) if causal else bias)
        dropped = fast_dropout(weights.to(q.dtype), dropout) if fast else F.dropout(weights.to(q.dtype), dropout)
        x = torch.matmul(dropped, value)
        if of_values is not None and distances is None:
            vectors = all_distances(of_values, self.farthest, q.size(2))
            x = x + relative_values(dropped, vectors.to(q.dtype))
        elif of_values is not None and distances is not None:
            # the weights of all keys at one distance share its vector
            index = distances.expand(q.size(0), q.size(1), q.size(2), -1)
            shares = torch.zeros(
                q.size(0), q.size(1), q.size(2), of_values.size(0), dtype=dropped.dtype, device=q.device
            )
            x = x + torch.matmul(shares.scatter_add(3, index, dropped), of_values.to(q.dtype))
        return x, weights.float() if need_weights else None

    def _split_heads(self, x: Tensor, sources: int) -> Tensor:
        """T x B x C -> sources x H x (B/sources * T) x D: hypotheses of one source are queries to the same keys."""
        x = x.view(x.size(0), sources, -1, self.num_heads, self.head_dim)
        return x.permute(1, 3, 2, 0, 4).flatten(2, 3)

    def _per_hypothesis(self, x: Tensor, length: int) -> Tensor:
        """sources x H x (beam * T) x D -> sources x beam x H x T x D."""
        return x.view(x.size(0), x.size(1), -1, length, x.size(3)).transpose(1, 2)

    def _own(
        self,
        query: Tensor,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        mask: Tensor | None,
        place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values (B x H x S x D) of all positions so far.

        With the *mask* and the *place* of a step, B are the sentences, and the queries and a position's keys those of
        all hypotheses.
        """
        length, batch = query.size(0), query.size(1) if mask is None else mask.size(0)
        if self.qkv_proj is not None and not torch.is_grad_enabled():
            qkv = self.qkv_proj(query).view(length, batch, -1, 3, self.num_heads, self.head_dim)
            qkv = qkv.permute(3, 1, 4, 2, 0, 5).flatten(3, 4)
            q, kv = qkv[0], qkv[1:]
        else:
            q = self._split_heads(self.q_proj(query), batch)
            k, v = self._split_heads(self.k_proj(query), batch), self._split_heads(self.v_proj(query), batch)
            if incremental_state is None:
                return q, k, v
            kv = torch.stack([k, v])
        if incremental_state is not None and self.own_cache is not None:
            kv = self.own_cache(incremental_state, kv, place)
        return q, kv[0], kv[1]

    def _of_memory(
        self,
        q: Tensor,
        memory: Tensor,
        padding: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (sources x H x S x D) of the memory, and what padding adds to the scores.

        They are computed at the first step of incremental decoding.
        """
        if incremental_state is not None and self.memory_cache is not None:
            saved = self.memory_cache(incremental_state)
            if saved is not None:
                return saved
        sources = memory.size(1)
        key = self._split_heads(self.k_proj(memory), sources)
        value = self._split_heads(self.v_proj(memory), sources)
        bias = self._padding_bias(padding, q)
        if incremental_state is not None and self.memory_cache is not None:
            key, value = by_column(key), value.contiguous()
            self.memory_cache.keep(incremental_state, key, value, bias)
        return key, value, bias

    def _padding_bias(self, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """What hides the keys under *padding* from all queries: B x 1 x 1 x S. *padding* may be that already."""
        if padding is None:
            return None
        return padding_bias(padding, q.dtype) if padding.dim() == 2 else padding.to(q.dtype)

    def _distances(self, queries: int, keys: int, beam: int, device: torch.device, place: Tensor | None) -> Tensor:
        """Which vector belongs to a query and a key (T x S): that of their distance. A position has *beam* keys.

        The queries are the last positions, or in a cache of a fixed capacity, where their keys have their *place*.
        """
        last = keys // beam - 1
        of_key = torch.arange(last + 1, device=device).repeat_interleave(beam)
        if place is None:
            of_query = torch.arange(last + 1 - queries // beam, last + 1, device=device)
        else:
            of_query = torch.div(place[:1], beam, rounding_mode="floor")
        vectors = 0 if self.relative_keys is None else self.relative_keys.size(0)
        distances = (of_key - of_query.unsqueeze(1)).clamp(-self.farthest, vectors - 1 - self.farthest)
        return distances + self.farthest

    def _relative_scores(self, q: Tensor, distances: Tensor | None) -> Tensor:
        """What relative positions add to the scores: B x H x T x S; *distances*: those of a decoding step."""
        relative_keys = self.relative_keys
        assert relative_keys is not None
        if distances is None:
            vectors = all_distances(relative_keys * self.head_dim**-0.5, self.farthest, q.size(2))
            return relative_scores(q, vectors.to(q.dtype))
        scores = torch.matmul(q * self.head_dim**-0.5, relative_keys.t().to(q.dtype))
        return scores.gather(3, distances.expand(q.size(0), q.size(1), q.size(2), -1))

    def make_generation_fast_(
        self, name: str, retain_dropout: bool = False, retain_dropout_modules: list[str] | None = None, **kwargs
    ) -> None:
        """fairseq's ``--retain-dropout``: keep dropout while translating."""
        named = retain_dropout_modules is None or "MultiheadAttention" in retain_dropout_modules
        self.retain_dropout = retain_dropout and named
        parts = [self.q_proj, self.k_proj, self.v_proj]
        if self.of_memory or self.qkv_proj is not None or not all(type(part) is nn.Linear for part in parts):
            return
        self.qkv_proj = join_projections(self)
        self.idle = ("q_proj", "k_proj", "v_proj")


def self_attention(stack: Stack, causal: bool, bias: bool = True) -> MultiheadAttention:
    """Self-attention of a layer of *stack*; *causal*: positions see no later ones."""
    return MultiheadAttention(
        stack.dim,
        stack.heads,
        dropout=stack.attention_dropout,
        bias=bias,
        relative_positions=stack.relative_positions,
        relative_values=stack.relative_values,
        causal=causal,
    )
