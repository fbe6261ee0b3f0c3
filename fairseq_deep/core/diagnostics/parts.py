"""Parts of a model for which gradient norms are reported, and norms of many tensors at once."""

import torch
from torch import Tensor, nn

from fairseq_deep.core.inits.walk import layer_modules
from fairseq_deep.core.keep_fp32 import HALF

SIDES = ("encoder", "decoder")


def part_parameters(model: nn.Module) -> dict[str, list[list[nn.Parameter]]]:
    """Return the parameters of each part of *model*.

    Returns:
        "encoder" and "decoder": a list for each layer, from the bottom; "embedding" and, if they have parameters,
        "encoder_aggregator" and "decoder_aggregator" (including the memory): one list each
    """
    parts: dict[str, list[list[nn.Parameter]]] = {}
    for side in SIDES:
        stack = getattr(model, side)
        parts[side] = [
            [parameter for module in modules for parameter in module.parameters()] for modules in layer_modules(stack)
        ]
        aggregator = list(stack.aggregator.parameters())
        if getattr(stack, "memory", None) is not None:
            aggregator += list(stack.memory.parameters())
        if aggregator:
            parts[f"{side}_aggregator"] = [aggregator]
    tables = [table for side in SIDES for table in getattr(model, side).embed_tokens.parameters()]
    parts["embedding"] = [list({id(table): table for table in tables}.values())]
    return parts


def tensor_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each of *tensors*, in fp32 or better: scaled gradients could overflow in fp16."""
    if not any(tensor.dtype in HALF for tensor in tensors):
        return list(torch._foreach_norm(tensors))
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))
