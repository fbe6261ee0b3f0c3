"""Source gain: how much a model uses its source.

    gain = NLL(y | x of another sentence) - NLL(y | x)

in nats per target token, averaged over the batch, without dropout. A model that ignores the source has a gain of 0,
however well it has learned the target language, which the loss does not show.
"""

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def source_gain(model: nn.Module, sample: dict[str, Any], padding_idx: int) -> float:
    """Return the gain (see above) on *sample*, with the sources shifted by one sentence.

    Args:
        model: fairseq's encoder-decoder model; its mode (train or eval) is restored
        sample: fairseq's batch: ``net_input``, ``target`` (B x T), of at least two sentences
        padding_idx: index of the padding symbol

    Raises:
        ValueError: there is only one sentence
    """
    inputs = sample["net_input"]
    if len(inputs["src_tokens"]) < 2:
        raise ValueError("the source gain requires at least two sentences: use a larger batch")
    moved = {name: inputs[name].roll(1, 0) for name in ("src_tokens", "src_lengths")}
    training = model.training
    model.eval()
    true, wrong = (_nll(model, sample, {**inputs, **other}, padding_idx) for other in ({}, moved))
    model.train(training)
    return float(wrong - true)


def _nll(model: nn.Module, sample: dict[str, Any], inputs: dict[str, Tensor], padding_idx: int) -> Tensor:
    scores = model.get_normalized_probs(model(**inputs), log_probs=True, sample=sample)
    return nn.functional.nll_loss(
        scores.flatten(0, 1).float(), sample["target"].flatten(), ignore_index=padding_idx
    )
