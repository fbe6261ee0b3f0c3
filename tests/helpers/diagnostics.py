"""What the tests of the measurements of gradients and ratios share."""

import torch

from fairseq_deep.core.diagnostics import sublayer_ratios


def loss_of(model, batch, seed=1):
    scores = model(*batch)[0]
    generator = torch.Generator().manual_seed(seed)
    return (scores * torch.randn(scores.shape, generator=generator)).sum()


def paddings(model, batch):
    pad = model.encoder.padding_idx
    return {"encoder": batch[0].eq(pad), "decoder": batch[2].eq(pad)}


def measure(model, batch):
    return sublayer_ratios(model, paddings(model, batch), lambda: loss_of(model, batch))


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind, ())) for module in model.modules() for kind in kinds)
