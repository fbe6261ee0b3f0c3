"""The encoder: embedding, layers connected by an aggregator, final norm."""

from typing import Dict, List, Optional, Tuple

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from fairseq_deep.core.attention.beam_reorder import hypotheses_per_sentence, read_order
from fairseq_deep.core.attention.masks import can_ask, padding_bias, product_type
from fairseq_deep.core.layers import LayerDrop, wrap_layer

from .checkpoints import keep_final_norm
from .layer_building import build_layer


class DeepTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder with our layers and an aggregator between them.

    fairseq's embedding, beam reordering and checkpoint upgrades are inherited; its loop over the layers differs
    between its versions and has no place for an aggregator, so the loop is ours.

    Attributes:
        stack: its description
        init: how its weights start
        layers: the L encoder layers, or the modules of their sub-layers
        layer_drop: which of them run
        history: the aggregator that connects them
        memory: what makes the decoder layers' own memories; None where all attend to the encoder's output
        shares_sources: the decoder takes one source for all hypotheses of a sentence
    """

    def __init__(self, cfg, dictionary, embed_tokens):
        self.stack, decoder = cfg.stacks["encoder"], cfg.stacks["decoder"]
        self.init = self.stack.init.build(self.stack)
        self._next_layer = 0
        super().__init__(cfg, dictionary, embed_tokens)
        parts = (layer if self.stack.layout.split else [layer] for layer in self.layers.children())
        self.layers = nn.ModuleList(part for layer in parts for part in layer)
        self.num_layers = len(self.layers)
        self.layer_drop = LayerDrop(self.stack.layerdrop, self.num_layers)
        self.history = self.stack.aggregator.build(self.stack)
        self.calls = self.history.calls
        self.modules_per_layer = self.stack.modules_per_layer
        self.memory = None if decoder.memory.name == "last" else decoder.memory.build(self.stack, decoder)
        self.memory_normalises = self.memory is not None and self.memory.normalises
        if not self.stack.layout.final_norm:
            self.layer_norm = None
        # fairseq's own decoder layers want a source for each hypothesis
        self.shares_sources = not (cfg.cross_self_attention or cfg.decoder.xformers_att_config)

    def build_encoder_layer(self, cfg):
        self._next_layer += 1
        parts = [wrap_layer(part, cfg) for part in build_layer(self.stack, self.init, self._next_layer)]
        return nn.ModuleList(parts) if self.stack.layout.split else parts[0]

    def forward_scriptable(
        self,
        src_tokens,
        src_lengths: Optional[Tensor] = None,
        return_all_hiddens: bool = False,
        token_embeddings: Optional[Tensor] = None,
    ) -> Dict[str, List[Tensor]]:
        """Encode a batch; the contract is that of fairseq's ``TransformerEncoderBase.forward``.

        Args:
            src_tokens: B x T, padded on either side
            src_lengths: not used, the padding says it
            return_all_hiddens: also return y_0 ... y_L as ``encoder_states``
            token_embeddings: B x T x C, in place of a look-up

        Returns:
            fairseq's dictionary of lists: ``encoder_out`` [T x B x C], ``encoder_padding_mask`` [B x T],
            ``encoder_embedding`` [B x T x C], ``encoder_states``, ``src_lengths`` [B x 1], ...; and
            ``encoder_memories`` [T x B x C each], one for each decoder layer, where they have their own
        """
        padding = src_tokens.eq(self.padding_idx)
        hidden: Optional[Tensor] = None
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if not can_ask(padding) or bool(padding.any()):
            hidden = padding_bias(padding, product_type(x))
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1).contiguous()  # T x B x C; each norm would copy a transposed view, twice

        states, history = self.run_layers(x, hidden, return_all_hiddens or self.memory is not None)
        x = self.history.finish(history)
        memories: List[Tensor] = []
        if self.memory is not None:
            memories = self.memory(states[:-1] + [x], history)  # what tops the stack counts as its last layer
        if self.layer_norm is not None:
            x = self.layer_norm(x)
            if not self.memory_normalises:
                memories = [self.layer_norm(memory) for memory in memories]

        lengths = src_tokens.ne(self.padding_idx).sum(dim=1, dtype=torch.int32).reshape(-1, 1).contiguous()
        nothing: List[Tensor] = []
        encoded = {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states if return_all_hiddens else nothing,
            "fc_results": nothing,
            "src_tokens": nothing,
            "src_lengths": [lengths],
        }
        if self.memory is not None:
            encoded["encoder_memories"] = memories
        return encoded

    def run_layers(
        self, x: Tensor, padding: Optional[Tensor], keeps_states: bool
    ) -> Tuple[List[Tensor], List[Tensor]]:
        """y_0 ... y_L if they are to be kept, and what the aggregator holds at the end.

        Args:
            x: y_0, T x B x C
            padding: what hides the padding of *x* from attention (B x 1 x 1 x T); None if nothing does
            keeps_states: return y_0 ... y_L
        """
        states: List[Tensor] = [x] if keeps_states else []
        history = self.history.start(x)
        runs = self.layer_drop()
        for index, layer in enumerate(self.layers):
            if runs[index]:
                x = self.history.read(history, index)
                if self.calls == 1:
                    x = layer(x, padding)
                else:
                    outputs: List[Tensor] = []
                    for _ in range(self.calls):
                        outputs.append(layer(self.history.point(x, outputs), padding))
                    x = self.history.combine(x, outputs)
                history = self.history.write(history, index, x)
                if keeps_states and (index + 1) % self.modules_per_layer == 0:
                    states.append(self.history.layer_output(history, x))
            else:
                history = self.history.skip(history, index)
        return states, history

    @torch.jit.export
    def reorder_encoder_out(self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor):
        """The output for the hypotheses *new_order*; where a sentence has several, it stays there once.

        Its key "hypotheses" then holds the numbers of the hypotheses of each sentence (sentences x beam).
        """
        if not self.shares_sources or len(encoder_out["encoder_out"]) == 0:
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
        return kept if order.torn else self._grouped(kept, beam)

    def _select(self, encoder_out: Dict[str, List[Tensor]], order: Tensor) -> Dict[str, List[Tensor]]:
        """The entries of the sources *order*."""
        selected: Dict[str, List[Tensor]] = {}
        for name, values in encoder_out.items():
            if name != "hypotheses":
                dim = 1 if name in ("encoder_out", "encoder_states", "encoder_memories") else 0
                selected[name] = [value.index_select(dim, order) for value in values]
        return selected

    def _grouped(self, encoder_out: Dict[str, List[Tensor]], beam: int) -> Dict[str, List[Tensor]]:
        """The output, marked as that of *beam* hypotheses for each sentence."""
        source = encoder_out["encoder_out"][0]
        grouped: Dict[str, List[Tensor]] = {}
        for name, values in encoder_out.items():
            grouped[name] = values
        grouped["hypotheses"] = [torch.arange(source.size(1) * beam, device=source.device).view(-1, beam)]
        return grouped

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        keep_final_norm(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
