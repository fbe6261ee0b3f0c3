"""Parts of our models as the functions and tensors that the naive forms take."""

import torch

from tests.reference.naive_dlcl import layer_norm


def affine(norm):
    return (norm.weight, norm.bias) if isinstance(norm, torch.nn.Module) and list(norm.parameters()) else None


def start(stack, tokens):
    """y_0, with the norm on the embedding where there is one."""
    x = stack.embed_tokens.weight[tokens] * stack.embed_tokens.embedding_dim**0.5
    x = (x if stack.embed_positions is None else x + stack.embed_positions(tokens)).transpose(0, 1)
    norm = affine(stack.layernorm_embedding)
    return x if norm is None else layer_norm(x, *norm)


def projections(module):
    names = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj, "out": module.out_proj}
    return {name: (linear.weight, linear.bias) for name, linear in names.items()}


