"""Statistics of the residual streams: their standard deviation, and the differences between positions.

With x_bpc the feature c of a layer's output at position p of sentence b, and means over all positions that are not
padding:

    std      = sqrt( mean_bpc (x_bpc - mean_bpc x)^2 )
    between  = mean_bpc (x_bpc - mean_p x_bc)^2 / mean_bpc (x_bpc - mean_bpc x)^2

*between* is the share of the variance between the positions of the same sentence. If it is 0, all positions are alike,
and higher layers cannot distinguish them: a stack that starts near 0 learns slowly.
"""

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def stream_statistics(
    model: nn.Module, net_input: dict[str, Any], padding_idx: int
) -> dict[str, dict[str, list[float]]]:
    """Measure std and between (see above) of y_0 ... y_L: {"std": {"encoder": [...], "decoder": [...]}, ...}.

    Args:
        model: a model of this package, in the mode (train or eval) to measure
        net_input: fairseq's: ``src_tokens`` and ``prev_output_tokens`` (B x T), ``src_lengths``
        padding_idx: index of the padding symbol
    """
    source, target = net_input["src_tokens"], net_input["prev_output_tokens"]
    encoder_out = model.encoder(source, net_input["src_lengths"], return_all_hiddens=True)
    decoded = model.decoder(target, encoder_out=encoder_out)[1]["inner_states"]
    streams = {"encoder": (encoder_out["encoder_states"], source), "decoder": (decoded, target)}
    return {
        name: {
            side: [float(statistic(state.float(), tokens.ne(padding_idx).t())) for state in states if state is not None]
            for side, (states, tokens) in streams.items()
        }
        for name, statistic in {"std": _std, "between": variance_between}.items()
    }


def _std(x: Tensor, words: Tensor) -> Tensor:
    return x[words].std(unbiased=False)


def variance_between(x: Tensor, words: Tensor) -> Tensor:
    """Return the share of the variance of *x* (T x B x C) between the positions of the same sentence.

    It does not synchronise with a GPU, and its shapes do not depend on the padding.

    Args:
        words: T x B, false where there is padding

    Returns:
        a number from 0 to 1; 0 if the variance is 0
    """
    kept = words.unsqueeze(2).to(x.dtype)
    count = kept.sum() * x.size(2)
    means = (x * kept).sum(0) / kept.sum(0).clamp(min=1.0)
    inside = ((x - means) * kept).square().sum()
    total = ((x - (x * kept).sum() / count) * kept).square().sum()
    return torch.where(total != 0, inside / total, total)
