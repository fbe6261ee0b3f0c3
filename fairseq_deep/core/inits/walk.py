"""Finds the matrices of a finished model, and fills each by the rule of its stack's method."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .base import Init, MatrixLocation

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_ROLES = {
    "self_attn": (*_PROJECTIONS, "gate", "fc1", "fc2", "input_proj", "pq_proj", "pc_proj"),
    "encoder_attn": (*_PROJECTIONS, "gate"),
    "ffn": ("fc1", "fc2", "fc_linear"),
}


_LIKE = {"pq_proj": "q_proj", "pc_proj": "k_proj"}
"""Roles that are initialised by the rule of another role."""


def layer_modules(stack: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each layer of *stack*: one module, or if layers are split, one per sub-layer."""
    modules, count = list(stack.layers), stack.stack.modules_per_layer
    return [modules[start : start + count] for start in range(0, len(modules), count)]


def layer_matrices(stack: nn.Module) -> Iterator[tuple[nn.Linear, MatrixLocation]]:
    """Yield the attention and feed-forward projections of all layers of *stack*, with their locations."""
    for number, modules in enumerate(layer_modules(stack), 1):
        for module in modules:
            for part in _ROLES:
                yield from _matrices_of(module if part == "ffn" else getattr(module, part, None), number, part)


def _matrices_of(owner: nn.Module | None, number: int, part: str) -> Iterator[tuple[nn.Linear, MatrixLocation]]:
    """Yield the projections of *owner*, and of its :class:`fairseq_deep.core.attention.luna.Packing`."""
    for role in _ROLES[part]:
        linear = getattr(owner, role, None)
        if isinstance(linear, nn.Linear):
            yield linear, MatrixLocation(number, part, _LIKE.get(role, role))
    if hasattr(owner, "pack"):
        yield from _matrices_of(owner.pack, number, part)


def _fill(matrices: Iterable[tuple[nn.Linear, MatrixLocation]], init: Init) -> None:
    for linear, place in matrices:
        init.matrix(linear.weight, place)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def _fill_layers(stack: nn.Module, init: Init) -> None:
    _fill(layer_matrices(stack), init)
    for number, modules in enumerate(layer_modules(stack), 1):
        for connection in [module.residual for module in modules if hasattr(module, "residual")]:
            for role, matrix in connection.matrices().items():
                init.matrix(matrix, MatrixLocation(number, "residual", role))
    for module in stack.layers.modules():
        for vectors in (getattr(module, "relative_keys", None), getattr(module, "relative_values", None)):
            if vectors is not None:
                init.relative_keys(vectors)


def _fill_tables(stack: nn.Module, init: Init, filled: set) -> None:
    for table in (stack.embed_tokens, stack.embed_positions):
        if not isinstance(table, nn.Embedding):  # sinusoids
            continue
        if table.weight.data_ptr() not in filled:
            init.embedding(table.weight)
            if table.padding_idx is not None:
                nn.init.zeros_(table.weight[table.padding_idx])
        filled.add(table.weight.data_ptr())
    output = getattr(stack, "output_projection", None)
    if isinstance(output, nn.Linear) and output.weight.data_ptr() not in filled:
        init.output(output.weight)


@torch.no_grad()
def initialise(model: nn.Module, encoder_init: Init, decoder_init: Init, keep: Sequence[Tensor] = ()) -> None:
    """Fill the matrices of *model* in place, and biases of attentions and feed-forward networks with 0.

    The encoder's method fills embedding tables and aggregator matrices that both stacks share.

    Args:
        model: a finished model
        encoder_init, decoder_init: the methods of its stacks
        keep: tables that must not be filled (pretrained embeddings)
    """
    filled = {table.data_ptr() for table in keep}
    for stack, init in ((model.encoder, encoder_init), (model.decoder, decoder_init)):
        if not init.touches:
            filled.add(stack.embed_tokens.weight.data_ptr())
            filled.update(matrix.data_ptr() for matrix in stack.aggregator.matrices())
            continue
        _fill_layers(stack, init)
        if stack.stack.packs and stack is model.decoder:
            for number, layer in enumerate(model.encoder.memory.layers, 1):
                _fill(_matrices_of(layer.pack, number, "encoder_attn"), init)
        for matrix in stack.aggregator.matrices():
            if matrix.data_ptr() not in filled:
                init.aggregator_matrix(matrix)
            filled.add(matrix.data_ptr())
        _fill_tables(stack, init, filled)
