"""Parts of our models as the functions and tensors that the naive forms take."""

import torch

from fairseq_deep.core.norms import LanguageNorm, RmsNorm
from tests.reference.naive_attention import rms_norm
from tests.reference.naive_dlcl import layer_norm
from tests.reference.naive_dropout import dropped


def affine(norm):
    return (norm.weight, norm.bias) if isinstance(norm, torch.nn.Module) and list(norm.parameters()) else None


LANGUAGES = []
"""Of the sentences that are compared: the rows of language norms."""


def norm(module):
    """A norm as a function."""
    if module is None or not list(module.parameters()):
        return lambda x: x
    if isinstance(module, RmsNorm):
        return lambda x: rms_norm(x, module.weight)
    rows = list(LANGUAGES) if isinstance(module, LanguageNorm) else ...
    return lambda x: layer_norm(x, module.weight[rows], module.bias[rows])


def start(stack, tokens):
    """y_0, with the norm on the embedding where there is one."""
    x = stack.embed_tokens.weight[tokens] * stack.embed_tokens.embedding_dim**0.5
    x = (x if stack.embed_positions is None else x + stack.embed_positions(tokens)).transpose(0, 1)
    return dropped(norm(stack.layernorm_embedding)(x))


def projections(module, names=("q", "k", "v", "out")):
    """The linear layer of each; packing has no output matrix."""
    return {name: getattr(module, f"{name}_proj") for name in names}
