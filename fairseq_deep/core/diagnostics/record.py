"""Training log of depth: each layer's share of the gradient norm, and statistics of the aggregators."""

import math

import torch
from torch import Tensor, nn

from .parts import part_parameters, tensor_norms

SIDES = {"enc": "encoder", "dec": "decoder"}


@torch.no_grad()
def depth_record(model: nn.Module) -> dict[str, float]:
    """Return shares of the gradient norm and summaries of the aggregators, after a backward pass.

    A share is the L2 norm over the gradients of a part's parameters, divided by the norm over all parameters of the
    model. Factors of every gradient (loss scale, number of tokens, clipping) cancel. All values are copied from a GPU
    in one transfer.

    Args:
        model: a model of this package

    Returns:
        "enc_1" ..., "dec_1" ..., "embed": shares of the layers and of the embeddings; "ratio_enc", "ratio_dec": the
            share of the first layer over the share of the last. They are omitted if a gradient is not finite (fairseq
            skips the update) or all gradients are 0. "dlcl_enc_newest", "lstm_dec_forget_gate" ...: statistics of
            the methods (``record``), by method and stack
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    shown = _shown(model)
    vectors = [torch.stack(tensor_norms([p.grad for p in parameters]))] if parameters else []
    vectors += [value.float().reshape(1) for value in shown.values()]
    if not vectors:
        return {}
    values = torch.cat([vector.to(vectors[0].device) for vector in vectors]).cpu().tolist()
    record = _shares(model, dict(zip(map(id, parameters), values)))
    record.update(zip(shown, values[len(parameters) :]))
    return record


def _shown(model: nn.Module) -> dict[str, Tensor]:
    """Return the statistics of the aggregators and the memory of *model*, by name."""
    found = {}
    for short, side in SIDES.items():
        stack = getattr(model, side)
        methods = {stack.stack.aggregator.name: stack.aggregator}
        memory = getattr(stack, "memory", None)
        if memory is not None:
            methods["memory"] = memory
        for name, method in methods.items():
            found.update({f"{name}_{short}_{key}": value for key, value in method.record().items()})
    return found


def _shares(model: nn.Module, norms: dict[int, float]) -> dict[str, float]:
    total = math.hypot(*norms.values())
    if not total or not math.isfinite(total):
        return {}
    parts = {
        name: [math.hypot(*(norms.get(id(parameter), 0.0) for parameter in group)) / total for group in groups]
        for name, groups in part_parameters(model).items()
    }
    shares = {"embed": parts["embedding"][0]}
    for short, side in SIDES.items():
        layers = parts[side]
        shares.update({f"{short}_{number}": share for number, share in enumerate(layers, 1)})
        if layers and layers[-1]:
            shares[f"ratio_{short}"] = layers[0] / layers[-1]
    return shares
