"""Fold the weights of post-norm connections r = w x + F(x) into plain ones, as DeepNet and Admin have them.

The stack then carries x'_i = w_i x_i between sub-layers (our derivation):

    LN_i(w_i x_i + F_i(x_i)) = LN_i(x'_i + F_i(x'_i / w_i)),    x'_{i+1} = w_{i+1} LN_i(...)

The matrices that read x_i get their columns divided by w_i. The norm that makes x_{i+1} gets its weight and bias
multiplied by w_{i+1}. Cross-attention reads keys and values from the encoder, whose last norm keeps its scale. At the
bottom, w_0 goes into the norm of the embeddings, or else into embeddings and positions. Where positions are fixed, a
number w_0 is divided out: LN(w_0 x + F(x)) is LN(x + F(x) / w_0), but for the norm's eps.

Names here: ``weights`` are w_0, w_1, ..., one per sub-layer of the stack, each of width C.
"""

import copy

import torch
from torch import Tensor, nn

from .folding import ENDS
from .positions import LearnedPositions
from .registry import UsageError
from .residuals.plain import Plain

READERS = {
    "self": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate"),
    "cross": ("encoder_attn.q_proj", "encoder_attn.gate"),
    "ffn": ("fc1", "fc_linear"),
}
"""The maps of each sub-layer that read its input."""


@torch.no_grad()
def fold_streams(model: nn.Module, tables: bool = False) -> set[str]:
    """Give the stacks of *model* whose connections weigh the stream plain ones, and weights that make up for it.

    Args:
        model: a :class:`~fairseq_deep.core.transformer.Transformer`
        tables: fixed positions may be scaled, too: the format stores them

    Returns:
        the sides that have changed

    Raises:
        UsageError: the weights cannot be moved; nothing has changed then
    """
    stacks = {side: getattr(model, side) for side in ("encoder", "decoder")}
    weights = {side: _weights(stack, side, tables) for side, stack in stacks.items() if _weighs(stack)}
    for side, found in weights.items():
        _fold(stacks[side], found, tables)
    return {*weights}


def _weighs(stack: nn.Module) -> bool:
    return any(layer.residual.weighs_stream for layer in stack.layers)


def _weights(stack: nn.Module, side: str, tables: bool) -> list[Tensor]:
    """The weights of all sub-layers, C each, after a check that they can be moved."""
    like = stack.layers[0].fc1.weight
    found = [
        torch.as_tensor(layer.residual.stream_weight(index)).to(like).expand(like.size(1)).clone()
        for layer in stack.layers
        for index in range(len(layer.sublayers))
    ]
    if not all(bool(weight.isfinite().all() and weight.ne(0).all()) for weight in found):
        raise UsageError(f"weights of residual connections that are 0 or not finite ({side}): they cannot be folded")
    if not _may_scale_input(stack, tables) and bool(found[0].ne(found[0][0]).any()):
        raise UsageError(
            f"weights of residual connections that differ by feature ({side}), above fixed positions, which the format "
            "cannot scale: train with --layernorm-embedding"
        )
    return found


def _may_scale_input(stack: nn.Module, tables: bool) -> bool:
    """Whether the first sub-layer's input can be scaled."""
    fixed = stack.embed_positions is not None and not isinstance(stack.embed_positions, LearnedPositions)
    return stack.layernorm_embedding is not None or tables or not fixed


def _fold(stack: nn.Module, weights: list[Tensor], tables: bool) -> None:
    sublayers = [(layer, part, norm) for layer in stack.layers for part, norm in layer.sublayers]
    if _may_scale_input(stack, tables):
        _scale_input(stack, weights[0])
    else:
        layer, part, _ = sublayers[0]
        for parameter in layer.get_submodule(ENDS[part]).parameters():
            parameter.div_(weights[0][0])
        weights = [torch.ones_like(weights[0]), *weights[1:]]
    above = [*weights[1:], torch.ones_like(weights[0])]
    for (layer, part, norm), own, following in zip(sublayers, weights, above):
        for module in filter(None, (_find(layer, name) for name in READERS[part])):
            module.weight.div_(own)
        for parameter in layer.get_submodule(norm).parameters():
            parameter.mul_(following)
    for layer in stack.layers:
        layer.residual = Plain(stack.stack, 1)


def _find(layer: nn.Module, name: str) -> nn.Module | None:
    """The module *name* of *layer*; None if the layer has none."""
    for part in name.split("."):
        layer = getattr(layer, part, None)
    return layer


def _scale_input(stack: nn.Module, weight: Tensor) -> None:
    """Multiply the embedding output y_0; a table that other parts share is copied first."""
    if stack.layernorm_embedding is not None:
        for parameter in stack.layernorm_embedding.parameters():
            parameter.mul_(weight)
        return
    stack.embed_tokens = copy.deepcopy(stack.embed_tokens)
    stack.embed_tokens.weight.mul_(weight)
    positions = stack.embed_positions
    if isinstance(positions, LearnedPositions):
        positions.weight.mul_(weight)
    elif positions is not None:
        positions.weights = positions.weights * weight
