"""Spread of the residual stream: the standard deviation of what each layer hands on."""

from typing import Any, Dict, List, Optional

import torch
from torch import Tensor, nn


@torch.no_grad()
def stream_std(model: nn.Module, net_input: Dict[str, Any], padding_idx: int) -> Dict[str, List[float]]:
    """Standard deviation, over positions that are not padding and over features, of y_0 ... y_L of both stacks.

    Args:
        model: a model of this package, in the mode (train or eval) that is to be measured
        net_input: fairseq's: ``src_tokens`` and ``prev_output_tokens`` (B x T), ``src_lengths``
        padding_idx: number of the padding symbol
    """
    encoder_out = model.encoder(net_input["src_tokens"], net_input["src_lengths"], return_all_hiddens=True)
    states = model.decoder(net_input["prev_output_tokens"], encoder_out=encoder_out)[1]["inner_states"]
    return {
        "encoder": _std(encoder_out["encoder_states"], net_input["src_tokens"].eq(padding_idx)),
        "decoder": _std(states, net_input["prev_output_tokens"].eq(padding_idx)),
    }


def _std(states: List[Optional[Tensor]], padding: Tensor) -> List[float]:
    words = ~padding.t()  # B x T -> T x B, as the states are
    return [float(state[words].float().std()) for state in states if state is not None]
