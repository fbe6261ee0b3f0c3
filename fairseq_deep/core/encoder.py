"""Transformer encoder: embedding, layers connected by an aggregator, final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention.beam_reorder import hypotheses_per_sentence, read_order
from .attention.luna import hidden_rows
from .attention.masks import is_sync_free, padding_bias, product_type
from .description import complete
from .languages import LanguageIndex, LanguageTransform
from .layers import LayerContext, wrap_layer
from .memories.luna import LunaMemory
from .native.encoder import find_encoder
from .norms import normalise
from .stack import Stack
from .transformer_stack import TransformerStack


class Encoder(TransformerStack):
    """Transformer encoder with an aggregator between its layers.

    Args:
        stack, embed_tokens: see :class:`TransformerStack`
        decoder: the decoder, with memories per layer or not; None: all layers attend to the encoder's output

    Attributes:
        memory: computes memories per decoder layer; None if all layers attend to the encoder's output
        packed: computes the packed sequence before the source (``--encoder-attn luna``), or None
        language_index: finds the target languages of sources; None if nothing depends on them
        language_transform: transforms the encoder's output and memories for the target language, or None
    """

    def __init__(self, stack: Stack, embed_tokens: nn.Embedding, decoder: Stack | None = None):
        super().__init__(stack, embed_tokens)
        self.packed = self.stack.attention.build().packed_sequence(self.stack)
        self.memory = None if decoder is None else self._build_memory(complete(decoder))
        self.memory_normalises = self.memory is not None and self.memory.normalises
        self.language_index = LanguageIndex(stack.languages) if stack.languages else None
        self.language_transform = None
        if stack.language_transform:
            self.language_transform = wrap_layer(LanguageTransform(stack.languages, stack.dim), stack)

    def _build_memory(self, decoder: Stack) -> nn.Module | None:
        if decoder.packs:
            memory = LunaMemory(self.stack, decoder)
            for layer in memory.layers:
                wrap_layer(layer, decoder)
            return memory
        if self.packed is not None and len(self.layers) and not self.layers[-1].normalize_before:
            self.layers[-1].packed_layer_norm = nn.Identity()  # nothing reads the packed sequence after it
        return None if decoder.memory.name == "last" else decoder.memory.build(self.stack, decoder)

    def embed(
        self, tokens: Tensor, embedded: Tensor | None = None, languages: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the embedding output y_0 (B x T x C) of *tokens* (B x T), and their scaled embeddings.

        Args:
            embedded: B x T x C, instead of a look-up
            languages: indices of the target languages, B, which norms may depend on
        """
        embedding = x = self.embed_scale * (self.embed_tokens(tokens) if embedded is None else embedded)
        if self.embed_positions is not None:
            x = embedding + self.embed_positions(tokens)
        return self.finish_embedding(x, languages), embedding

    def forward(
        self,
        src_tokens,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Encode a batch.

        Args:
            src_tokens: B x T, padded on either side
            src_lengths: not used, the padding implies them
            return_all_hiddens: also return y_0 ... y_L as ``encoder_states``
            token_embeddings: B x T x C, instead of a look-up

        Returns:
            fairseq's dictionary of lists: ``encoder_out`` [T x B x C], ``encoder_padding_mask`` [B x T],
            ``encoder_embedding`` [B x T x C], ``encoder_states``, ``src_lengths`` [B x 1], ...; if there are memories
            per decoder layer, ``encoder_memories`` [T x B x C each]; and if the norms of the decoder depend on target
            languages, ``languages`` [B]
        """
        padding = src_tokens.eq(self.padding_idx)
        languages = None if self.language_index is None else self.language_index(src_tokens, padding)
        hidden = None
        x, embedding = self.embed(src_tokens, token_embeddings, languages)
        if not is_sync_free(padding) or bool(padding.any()):
            hidden = padding_bias(padding, product_type(x))
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1).contiguous()  # T x B x C; each norm would copy a transposed view twice

        keeps_states = return_all_hiddens or self.memory is not None
        if self.packed is None:
            states, state = self._run(x, LayerContext(padding=hidden, languages=languages), keeps_states)
            x = self.aggregator.finish(state)
            memories = self._memories(states, x, state, languages)
            x = x if self.layer_norm is None else normalise(self.layer_norm, x, languages)
        else:
            x, memories, states = self._run_packed(x, padding, hidden, keeps_states)
        if self.language_transform is not None:
            x = self.language_transform(x, languages)
            memories = [self.language_transform(memory, languages) for memory in memories]

        lengths = src_tokens.ne(self.padding_idx).sum(dim=1, dtype=torch.int32).reshape(-1, 1).contiguous()
        encoded = {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states if return_all_hiddens else [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [lengths],
        }
        if self.memory is not None:
            encoded["encoder_memories"] = memories
        if self.stack.language_norm:
            encoded["languages"] = [languages]
        return encoded

    def _memories(
        self, states: list[Tensor], x: Tensor, state: list[Tensor], languages: Tensor | None
    ) -> list[Tensor]:
        """Compute the memories of the decoder layers; see :meth:`Memory.forward`."""
        if self.memory is None:
            return []
        memories = self.memory(states[:-1] + [x], state)  # the stack's output replaces the last layer's
        if self.layer_norm is None or self.memory_normalises:
            return memories
        return [normalise(self.layer_norm, memory, languages) for memory in memories]

    def _run_packed(
        self, x: Tensor, padding: Tensor, hidden: Tensor | None, keeps_states: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the layers on the packed sequence followed by *x*; return the output, the memories and y_0 ... y_L.

        Args:
            x: y_0, T x B x C
            padding: B x T, true where *x* is padding
            hidden: the :func:`padding_bias` of *padding*; None without padding
            keeps_states: return y_0 ... y_L
        """
        rows, all_hidden = self.packed.length, None
        if hidden is not None or x.size(0) < rows:
            both = torch.cat([hidden_rows(padding, rows), padding], dim=1)
            all_hidden = padding_bias(both, product_type(x))
        x = torch.cat([self.packed(x.size(1)).to(x.dtype), x])
        states, state = self._run(x, LayerContext(padding=all_hidden), keeps_states)
        x = self.aggregator.finish(state)
        p, x = x.split([rows, x.size(0) - rows])
        x = x if self.layer_norm is None else self.layer_norm(x)
        memories = [] if self.memory is None else self.memory(p, x, hidden)
        return x, memories, [state[rows:] for state in states]

    def _run(self, x: Tensor, context: LayerContext, keeps_states: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return y_0 ... y_L if *keeps_states*, and the final state of the aggregator; in kernels, if possible."""
        aggregator, native = self.aggregator, find_encoder(self, x, context.padding)
        if native is not None and aggregator.running_sum and not keeps_states:
            return [], aggregator.write(aggregator.start(x), self.num_layers - 1, native(x, context.padding))
        layers = None if native is None else native.layers(x, context.padding)
        return self.run_layers(x, context, keeps_states=keeps_states, layers=layers)[:2]

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor):
        """Return the output for the hypotheses *new_order*; the hypotheses of each sentence share one entry.

        The key "hypotheses" then holds the indices of the hypotheses of each sentence (sentences x beam).
        """
        if not encoder_out["encoder_out"]:
            return self._select(encoder_out, new_order)
        count = encoder_out["encoder_out"][0].size(1)
        if "hypotheses" not in encoder_out:
            beam = hypotheses_per_sentence(new_order, count)
            if beam == 1:
                return self._select(encoder_out, new_order)
            return self._grouped(encoder_out, beam)
        beam = encoder_out["hypotheses"][0].size(1)
        order = read_order(new_order, count, beam)
        sources = order.sources
        if sources is None:
            return encoder_out
        kept = self._select(encoder_out, sources)
        return kept if order.splits_sentences else self._grouped(kept, beam)

    def _select(self, encoder_out: dict[str, list[Tensor]], order: Tensor) -> dict[str, list[Tensor]]:
        """Return the entries of the sources *order*."""
        selected = {}
        for name, values in encoder_out.items():
            if name != "hypotheses":
                dim = 1 if name in ("encoder_out", "encoder_states", "encoder_memories") else 0
                selected[name] = [value.index_select(dim, order) for value in values]
        return selected

    def _grouped(self, encoder_out: dict[str, list[Tensor]], beam: int) -> dict[str, list[Tensor]]:
        """Return the output with a mark for *beam* hypotheses per sentence."""
        source = encoder_out["encoder_out"][0]
        numbers = torch.arange(source.size(1) * beam, device=source.device).view(-1, beam)
        return {**encoder_out, "hypotheses": [numbers]}
