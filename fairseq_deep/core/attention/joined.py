"""Queries, keys and values of a self-attention as one product, for generation.

The three matrices become parts of one. Checkpoints know nothing of it: they have the parts.
"""


import torch
from torch import Tensor, nn


@torch.no_grad()
def join_linear(parts: list[nn.Linear]) -> nn.Linear:
    """One matrix product for several of the same input: its output has theirs one after the other.

    The parts keep their weights, as views of the whole.
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
    """The product of the three projections of *attention*, which from now on saves and loads them as before."""
    attention._register_state_dict_hook(_leave_out_joined)
    attention._register_load_state_dict_pre_hook(_put_in_joined)
    return join_linear([attention.q_proj, attention.k_proj, attention.v_proj])
