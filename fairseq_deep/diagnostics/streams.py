"""What the residual streams of a model are like: how wide they are, and whether they tell positions apart.

With x_pc the feature c of what a layer hands on at position p, over all positions of a batch that are not padding:

    std      = sqrt( mean_pc (x_pc - mean_pc x)^2 )
    between  = mean_pc (x_pc - mean_p x_c)^2 / mean_pc (x_pc - mean_pc x)^2

*between* is the share of the variance that is between positions: 1 where features differ by position alone, 0 where all
positions have become alike, and nothing above can know which word is where. A stack that starts near 0 learns slowly.
"""

from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor, nn


def variance_between(x: Tensor) -> Tensor:
    """The share of the variance of *x* (positions x C) that is between positions; 0 where there is no variance."""
    x = x.float()
    total = x.var(unbiased=False)
    return x.var(0, unbiased=False).mean() / total.clamp(min=torch.finfo(x.dtype).tiny)


def _std(x: Tensor) -> Tensor:
    return x.float().std()


STATISTICS: Dict[str, Callable[[Tensor], Tensor]] = {"std": _std, "between": variance_between}


@torch.no_grad()
def stream_statistics(
    model: nn.Module, net_input: Dict[str, Any], padding_idx: int
) -> Dict[str, Dict[str, List[float]]]:
    """std and between (see above) of y_0 ... y_L of both stacks: {"std": {"encoder": [...], "decoder": [...]}, ...}.

    Args:
        model: a model of this package, in the mode (train or eval) that is to be measured
        net_input: fairseq's: ``src_tokens`` and ``prev_output_tokens`` (B x T), ``src_lengths``
        padding_idx: number of the padding symbol
    """
    encoder_out = model.encoder(net_input["src_tokens"], net_input["src_lengths"], return_all_hiddens=True)
    decoded = model.decoder(net_input["prev_output_tokens"], encoder_out=encoder_out)[1]["inner_states"]
    states = {
        "encoder": _words(encoder_out["encoder_states"], net_input["src_tokens"].eq(padding_idx)),
        "decoder": _words(decoded, net_input["prev_output_tokens"].eq(padding_idx)),
    }
    return {
        name: {side: [float(statistic(state)) for state in kept] for side, kept in states.items()}
        for name, statistic in STATISTICS.items()
    }


def _words(states: List[Optional[Tensor]], padding: Tensor) -> List[Tensor]:
    """The positions of each state (T x B x C) that are not *padding* (B x T): positions x C."""
    words = ~padding.t()
    return [state[words] for state in states if state is not None]
