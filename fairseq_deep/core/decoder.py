"""The decoder: embedding, layers connected by an aggregator, final norm, output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import HypothesisState, MultiheadAttention, SharedBeamState
from .attention.masks import future_mask, padding_bias, product_type, seen_padding
from .decoding import CompiledSteps, unpack_linear
from .decoding_state import DecodingState, Source
from .languages import languages_of, reorder_languages
from .layers import LayerContext
from .native.decoder import NativeState, find_decoder
from .native.steps import begin_step
from .norms import normalise
from .registry import UsageError
from .stack import Stack
from .transformer_stack import TransformerStack


class Decoder(TransformerStack):
    """Transformer decoder with an aggregator between its layers.

    The aggregator combines the layers of one position, so incremental decoding needs no state for it.

    Args:
        stack, embed_tokens: see :class:`TransformerStack`; the embedding may have another width

    Attributes:
        beam_state: groups the hypotheses of each sentence in beam search
        need_attn: also return attention weights in decoding steps
        compiled: runs decoding steps instead of :meth:`run_step`, if it is not None (:meth:`compile_steps`)
        caches: in generation, the modules with a state per hypothesis, in the order of their computation
    """

    def __init__(self, stack: Stack, embed_tokens: nn.Embedding):
        super().__init__(stack, embed_tokens)
        stack = self.stack
        names = stack.sublayers if stack.layout.split else ()
        self.source_offset = max([names.index(name) for name in ("cross", "merged") if name in names], default=0)
        own, heads = stack.alignment_layer, stack.alignment_heads
        self.alignment_layer = stack.layers - 1 if own is None else own
        self.alignment_heads = None if own is None else heads or 1
        self.pads_right, self.aligns, self.need_attn = stack.pads_right, stack.aligns, True
        self.packs = stack.packs
        self.compiled = self.caches = None
        parts = list(self.layers.modules())
        self.beam_state = SharedBeamState(
            attends=any(isinstance(part, MultiheadAttention) and not part.of_memory for part in parts),
            averages=any(isinstance(part, HypothesisState) and part.counts_words for part in parts),
        )
        self.relative = self.beam_state.attends and stack.relative_positions is not None

    def _build_input(self) -> None:
        self.project_in_dim = _projection(self.embed_tokens.embedding_dim, self.stack.dim)

    def _build_output(self) -> None:
        width = self.stack.output_dim or self.stack.dim
        self.project_out_dim = _projection(self.stack.dim, width)
        self.output_projection = nn.Linear(width, self.embed_tokens.num_embeddings, bias=False)
        if self.stack.tied_output:
            self.output_projection.weight = self.embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, std=width**-0.5)

    def make_generation_fast_(self, need_attn: bool = False, **_) -> None:
        """Prepare for generation (fairseq also calls it); *need_attn*: steps return attention weights.

        Raises:
            UsageError: there are no weights of source tokens
        """
        if need_attn and self.packs:
            raise UsageError(
                f"--decoder-attn {self.stack.attention.name} has no weights of source words: omit --print-alignment"
            )
        self.need_attn = bool(need_attn)
        # iterating over all modules at each step would take a tenth of the time of small batches
        self.caches = self.find_caches()

    def find_caches(self) -> list[nn.Module]:
        """Return the modules with a state per hypothesis: they have a method ``reorder``."""
        return [module for module in self.modules() if hasattr(module, "reorder") and module is not self.beam_state]

    def compile_steps(self, capacity: int | None = None, **options) -> None:
        """Compile decoding steps with ``torch.compile``, over caches of a fixed capacity.

        Args:
            capacity: maximum number of target positions; None starts at 64 and doubles it when needed
            options: options of ``torch.compile``

        Raises:
            UsageError: *capacity* is below 1
        """
        self.compiled = CompiledSteps(type(self).run_step, capacity, **options)
        unpack_linear(self)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        **alignment: Any,
    ) -> tuple[Tensor, dict]:
        """Return scores at each position (B x T x V), and the dictionary of :meth:`extract_features`.

        Args:
            features_only: return features instead of scores
            src_lengths, return_all_hiddens: not used
        """
        x, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state, **alignment)
        return x if features_only else self.output_layer(x), extra

    def output_layer(self, features: Tensor) -> Tensor:
        """Return scores of the vocabulary for *features*."""
        return self.output_projection(features)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return scaled embeddings of *tokens*."""
        return self.embed_scale * self.embed_tokens(tokens.contiguous())

    def embed(self, tokens: Tensor, positions: Tensor | None, languages: Tensor | None = None) -> Tensor:
        """Return the embedding output y_0 (T x B x C).

        Args:
            tokens: B x T
            positions: B x T x C or C, added to the embeddings; None for none
            languages: indices of the target languages, B
        """
        x = self.look_up(tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if positions is not None:
            x = x + positions
        return self.finish_embedding(x, languages).transpose(0, 1).contiguous()

    def masks(self, tokens: Tensor, like: Tensor, causal: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the masks of self-attention, None if nothing has to be masked.

        Args:
            tokens: B x T
            like: has the type and the device of the masks
            causal: positions see no later ones

        Returns:
            a mask of padding, B x T or its :func:`padding_bias`; and a mask of later positions, T x T, or B x 1 x T x T
            if it also hides padding. If the second is None, layers must be causal themselves.
        """
        padding = seen_padding(tokens.eq(self.padding_idx), causal, self.pads_right)
        if not self.beam_state.attends:
            return padding, None  # averages count tokens, and need no bias
        future = None
        if causal and (padding is not None or self.relative):
            future = future_mask(tokens.size(1), tokens.size(1), like)
        if padding is None:
            return None, future
        bias = padding_bias(padding, like.dtype)
        return (bias, None) if future is None else (None, future + bias)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict]:
        """Compute the features of a batch.

        Args:
            prev_output_tokens: B x T; with *incremental_state* only the last column is computed
            encoder_out: the encoder's dictionary
            incremental_state: the attentions' caches
            full_context_alignment: positions also see later ones
            alignment_layer: index of the layer that returns its attention to the source (default:
                ``--alignment-layer``, or the last; in training none, unless the task loads alignments)
            alignment_heads: number of heads to average (default: ``--alignment-heads``, or all)

        Returns:
            B x T x C, and a dictionary with ``attn`` [B x T x S] and ``inner_states`` y_0 ... y_M
        """
        source = self.read_source(encoder_out)
        if incremental_state is not None:
            length = prev_output_tokens.size(1)
            state = DecodingState(self, source, incremental_state, length - 1)
            return self.step_features(state, prev_output_tokens[:, -1], alignment_layer, alignment_heads)
        aligned, heads = self._aligned(alignment_layer, alignment_heads, decoding=False)
        return _result(*self._whole(prev_output_tokens, not full_context_alignment, source, aligned), heads)

    def start(self, encoder_out: dict[str, list[Tensor]], beam: int = 1) -> DecodingState | NativeState:
        """Return the state of incremental decoding before the first position.

        Args:
            encoder_out: the encoder's dictionary, with one entry per sentence
            beam: largest number of hypotheses per sentence
        """
        source = self.read_source(encoder_out)
        native = find_decoder(self, source.memory)
        if native is None:
            return DecodingState(self, source)
        padding = None
        if source.padding is not None and bool(source.padding.any()):
            padding = padding_bias(source.padding, torch.float32)
        return NativeState(native, self, source._replace(padding=padding), beam)

    def read_source(self, encoder_out: dict[str, list[Tensor]] | None) -> Source:
        """Return what the decoder reads of the encoder's dictionary.

        Raises:
            UsageError: the dictionary lacks the languages that the norms depend on
        """
        source = Source.of(encoder_out or {}, self.packs)
        if self.stack.language_norm and source.languages is None:
            raise UsageError("--language-norm requires languages in encoder_out: pass the encoder's whole output")
        return source

    def _aligned(self, layer: int | None, heads: int | None, decoding: bool) -> tuple[int, int | None]:
        """Return the index of the module that returns attention weights (-1 for none), and the number of heads."""
        if self.packs:
            return -1, heads  # no weights align a packed source
        if layer is None:
            wanted = (self.need_attn or not decoding) and (self.aligns or not self.training)
            layer, heads = (self.alignment_layer if wanted else -1), heads or self.alignment_heads
        return (layer * self.modules_per_layer + self.source_offset if layer >= 0 else -1), heads

    def _whole(self, tokens: Tensor, causal: bool, source: Source, aligned: int):
        """Run all positions of *tokens* (B x T); see :meth:`_features`."""
        positions = None if self.embed_positions is None else self.embed_positions(tokens)
        languages, memory_padding = source.languages, source.padding
        if languages is not None:
            languages = languages_of(languages, len(tokens), None)
        x = self.embed(tokens, positions, languages)
        like = x.new_empty(0, dtype=product_type(x))
        padding, mask = self.masks(tokens, like, causal)
        if memory_padding is not None:
            memory_padding = padding_bias(memory_padding, like.dtype)
        causal = causal and mask is None
        context = LayerContext(source.memory, memory_padding, None, mask, padding, causal, languages=languages)
        return self._features(x, context, source.memories, aligned)

    def step_features(
        self, state: DecodingState, words: Tensor, layer: int | None = None, heads: int | None = None
    ) -> tuple[Tensor, dict]:
        """Advance *state* by one position.

        Args:
            words: the newest token of each hypothesis, B
            layer, heads: layer and number of heads of attention weights, as for :meth:`extract_features`

        Returns:
            features (B x 1 x C), and the dictionary of :meth:`extract_features`
        """
        state.length += 1
        aligned, heads = self._aligned(layer, heads, decoding=True)
        source, words = state.source, words.unsqueeze(1).contiguous()
        if source.languages is not None:
            source = source._replace(languages=languages_of(source.languages, len(words), state.caches))
        inputs = (state.caches, words, self.position_row(state.length), source, aligned)
        return _result(*(self.run_step(*inputs) if self.compiled is None else self.compiled(self, *inputs)), heads)

    def position_row(self, length: int) -> Tensor | None:
        """Return the position (C) of the last of *length* tokens; None without absolute positions."""
        return None if self.embed_positions is None else self.embed_positions.row(length)

    def run_step(
        self, caches: dict, words: Tensor, position: Tensor | None, source: Source, aligned: int
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run a decoding step without a synchronisation; see :meth:`_features`.

        Args:
            caches: see :class:`DecodingState`
            words: B x 1
            position: C, added to the embeddings
            source: the encoded batch, with the languages of the hypotheses
            aligned: see :meth:`run_layers`
        """
        x = self.embed(words, position, source.languages)
        sources = x.size(1) if source.memory is None else source.memory.size(1)
        step = self.beam_state(caches, sources, x, words.ne(self.padding_idx))
        prepared = source.memory is not None and self.caches is not None and not self.stack.value_residual
        native = begin_step(self.layers, x, step) if prepared else None
        context = LayerContext(
            source.memory, source.padding, caches, step=step, native=native, languages=source.languages
        )
        return self._features(x, context, source.memories, aligned)

    def _features(
        self, x: Tensor, context: LayerContext, memories: list[Tensor], aligned: int
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return features (B x T x C), attention weights or None, and y_0 ... y_M; see :meth:`run_layers`."""
        states, state, attn = self.run_layers(x, context, memories, aligned)
        x = self.finish(self.aggregator.finish(state), context.languages)
        return x, None if attn is None else attn.float().to(states[-1]), states

    def finish(self, x: Tensor, languages: Tensor | None) -> Tensor:
        """Return the features (B x T x C) of the stack's output *x* (T x B x C)."""
        if self.layer_norm is not None:
            x = normalise(self.layer_norm, x, languages)
        x = x.transpose(0, 1)
        return x if self.project_out_dim is None else self.project_out_dim(x)

    def reorder_incremental_state_scripting(self, incremental_state: dict, new_order: Tensor) -> None:
        """Continue with the hypotheses *new_order* (B); the effect on the caches is computed once for all of them.

        fairseq's generator calls this method.
        """
        reorder_languages(incremental_state, new_order)
        order = self.beam_state.reorder(incremental_state, new_order)
        if order is not None:
            for cache in self.find_caches() if self.caches is None else self.caches:
                cache.reorder(incremental_state, order)


def _result(x: Tensor, attn: Tensor | None, states: list[Tensor], heads: int | None) -> tuple[Tensor, dict]:
    """Return the result of :meth:`Decoder.extract_features`, with weights averaged over the first *heads* heads."""
    return x, {"attn": [None if attn is None else attn[:heads].mean(dim=0)], "inner_states": states}


def _projection(inputs: int, outputs: int) -> nn.Linear | None:
    """Build a projection between two widths; None if they are equal."""
    if inputs == outputs:
        return None
    projection = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(projection.weight)
    return projection
