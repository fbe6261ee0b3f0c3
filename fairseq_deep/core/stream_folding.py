"""Folds the weights of post-norm connections r = w x + F(x), as in DeepNet and Admin, into plain connections.

The stack then computes x'_i = w_i x_i between sub-layers (our derivation):

    LN_i(w_i x_i + F_i(x_i)) = LN_i(x'_i + F_i(x'_i / w_i)),    x'_{i+1} = w_{i+1} LN_i(...)

The columns of matrices that read x_i are divided by w_i. Weight and bias of the norm that computes x_{i+1} are
multiplied by w_{i+1}. Cross-attention reads keys and values from the encoder, and the encoder's last norm keeps its
scale. At the bottom, w_0 is folded into the norm of the embeddings, or into embeddings and positions. If positions are
fixed, a scalar w_0 is divided out: LN(w_0 x + F(x)) is LN(x + F(x) / w_0), except for the norm's eps.

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
"""Linear maps of each sub-layer that read its input."""


@torch.no_grad()
def fold_streams(model: nn.Module, tables: bool = False) -> set[str]:
    """Replace connections that weight the stream by plain connections, and change the weights accordingly.

    Args:
        model: a :class:`~fairseq_deep.core.transformer.Transformer`
        tables: fixed positions may also be scaled: the format stores them

    Returns:
        the changed sides

    Raises:
        UsageError: the weights cannot be folded; the model is then unchanged
    """
    stacks = {side: getattr(model, side) for side in ("encoder", "decoder")}
    weights = {side: _weights(stack, side, tables) for side, stack in stacks.items() if _weighs(stack)}
    for side, found in weights.items():
        _fold(stacks[side], found, tables)
    return {*weights}


def _weighs(stack: nn.Module) -> bool:
    return any(layer.residual.weighs_stream for layer in stack.layers)


def _weights(stack: nn.Module, side: str, tables: bool) -> list[Tensor]:
    """Return the weights of all sub-layers, C each, after checking that they can be folded."""
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
    """Return whether the first sub-layer's input can be scaled."""
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
    """Return the module *name* of *layer*; None if the layer lacks it."""
    for part in name.split("."):
        layer = getattr(layer, part, None)
    return layer


def _scale_input(stack: nn.Module, weight: Tensor) -> None:
    """Scale the embedding output y_0; shared tables are copied first."""
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
