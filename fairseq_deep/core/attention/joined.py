"""Computes queries, keys and values of a self-attention as one product, for generation.

The three matrices become views of one matrix. Checkpoints store them separately, as before.
"""


import torch
from torch import Tensor, nn


@torch.no_grad()
def join_linear(parts: list[nn.Linear]) -> nn.Linear:
    """Join linear layers with the same input into one that concatenates their outputs.

    The weights of *parts* become views of the joined matrix.
    """
    first = parts[0]
    bias = first.bias is not None
    joined = nn.Linear(first.in_features, sum(part.out_features for part in parts), bias=bias)
    joined = joined.to(first.weight).requires_grad_(False)
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        start = rows.stop
        for whole, own in ((joined.weight, part.weight), (joined.bias, part.bias)):
            if own is not None:
                whole[rows] = own
                own.data = whole[rows]
    return joined


def _put_in_joined(state: dict[str, Tensor], prefix: str, *args) -> None:
    for part in ("weight", "bias"):
        own = [state.get(f"{prefix}{name}_proj.{part}") for name in "qkv"]
        if all(value is not None for value in own):
            state[f"{prefix}qkv_proj.{part}"] = torch.cat(own)


def _leave_out_joined(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata) -> None:
    for part in ("weight", "bias"):
        state.pop(f"{prefix}qkv_proj.{part}", None)


def join_projections(attention: nn.Module) -> nn.Linear:
    """Join the three projections of *attention*; its state dict still has them separately."""
    attention._register_state_dict_hook(_leave_out_joined)
    attention._register_load_state_dict_pre_hook(_put_in_joined)
    return join_linear([attention.q_proj, attention.k_proj, attention.v_proj])
