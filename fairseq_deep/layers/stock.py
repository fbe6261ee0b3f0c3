"""fairseq's own decoder layer, for the two of its attentions that ours do not have."""

from typing import Dict, List, Optional

from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor


class StockDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer; its hypotheses share no keys, so that there is no *beam_mask* for it."""

    def forward(
        self,
        x,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        prev_self_attn_state: Optional[List[Tensor]] = None,
        prev_attn_state: Optional[List[Tensor]] = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        beam_mask: Optional[Tensor] = None,
    ):
        """Run the layer; see :meth:`DecoderLayer.forward`."""
        return super().forward(
            x,
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            prev_self_attn_state,
            prev_attn_state,
            self_attn_mask,
            self_attn_padding_mask,
            need_attn,
            need_head_weights,
        )
