"""The encoder: embedding, layers connected by an aggregator, final norm."""

from typing import Dict, List, Optional

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor

from ..attention.beams import hypotheses_per_sentence, kept_sentences, same_sentences
from ..layers import AttentionEncoderLayer, EncoderLayer, wrap_layer
from .building import attention_only, build_aggregator, build_init, keep_final_norm


class DeepTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder with our layers and an aggregator between them.

    fairseq's embedding, beam reordering and checkpoint upgrades are inherited; its loop over the layers differs
    between its versions and has no place for an aggregator, so the loop is ours.

    Attributes:
        layers: the L encoder layers
        history: the aggregator that connects them
        shares_sources: the decoder takes one source for all hypotheses of a sentence
    """

    def __init__(self, cfg, dictionary, embed_tokens):
        super().__init__(cfg, dictionary, embed_tokens)
        self.history = build_aggregator(cfg, "encoder", self.num_layers, embed_tokens.embedding_dim)
        # fairseq's own decoder layers want a source for each hypothesis
        self.shares_sources = not (cfg.cross_self_attention or cfg.decoder.xformers_att_config)

    def build_encoder_layer(self, cfg):
        if attention_only(cfg, "encoder"):
            return wrap_layer(AttentionEncoderLayer(cfg), cfg)
        return wrap_layer(EncoderLayer(cfg, build_init(cfg, "encoder").connection()), cfg)

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
            ``encoder_embedding`` [B x T x C], ``encoder_states``, ``src_lengths`` [B x 1], ...
        """
        padding = src_tokens.eq(self.padding_idx)
        layer_padding: Optional[Tensor] = None
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if bool(padding.any()):
            layer_padding = padding
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1)  # B x T x C -> T x B x C

        states: List[Tensor] = []
        if return_all_hiddens:
            states.append(x)
        history = self.history.start(x)
        for index, layer in enumerate(self.layers):
            x = layer(self.history.read(history, index), layer_padding)
            history = self.history.write(history, index, x)
            if return_all_hiddens:
                states.append(self.history.layer_output(history, x))
        x = self.history.finish(history)
        if self.layer_norm is not None:
            x = self.layer_norm(x)

        lengths = src_tokens.ne(self.padding_idx).sum(dim=1, dtype=torch.int32).reshape(-1, 1).contiguous()
        nothing: List[Tensor] = []
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": nothing,
            "src_tokens": nothing,
            "src_lengths": [lengths],
        }

    @torch.jit.export
    def reorder_encoder_out(self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor):
        """The output for the hypotheses *new_order*; where a sentence has several, it stays there once.

        Its key "beam" then holds an empty tensor with as many rows as a sentence has hypotheses.
        """
        if not self.shares_sources or len(encoder_out["encoder_out"]) == 0:
            return self._select(encoder_out, new_order, 1)
        count = encoder_out["encoder_out"][0].size(1)
        if "beam" not in encoder_out:
            beam = hypotheses_per_sentence(new_order, count)
            if beam == 1:
                return self._select(encoder_out, new_order, 1)
            order = torch.arange(count, device=new_order.device)
        else:
            beam = encoder_out["beam"][0].size(0)
            sentences = kept_sentences(new_order, beam)
            if sentences is None:
                return self._select(encoder_out, torch.div(new_order, beam, rounding_mode="floor"), 1)
            order = sentences
        return self._select(encoder_out, order, beam)

    def _select(self, encoder_out: Dict[str, List[Tensor]], order: Tensor, beam: int) -> Dict[str, List[Tensor]]:
        """The entries of the sentences *order*, marked as those of *beam* hypotheses each."""
        unchanged = len(encoder_out["encoder_out"]) > 0 and same_sentences(order, encoder_out["encoder_out"][0].size(1))
        selected: Dict[str, List[Tensor]] = {}
        for name, values in encoder_out.items():
            if name != "beam":
                dim = 1 if name in ("encoder_out", "encoder_states") else 0
                selected[name] = values if unchanged else [value.index_select(dim, order) for value in values]
        if beam > 1:
            selected["beam"] = [torch.empty(beam, 0)]
        return selected

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        keep_final_norm(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
