"""Parts of our models as the functions and tensors that the naive forms take."""

import torch

from tests.reference import naive_connections as naive
from tests.reference.naive_dlcl import layer_norm


def affine(norm):
    return (norm.weight, norm.bias) if isinstance(norm, torch.nn.Module) and list(norm.parameters()) else None


def functions(layer, memory, source_seen, target_seen):
    """The pairs (F, LN) of a layer's sub-layers; *memory* is None in the encoder."""
    pairs = []
    for name in ("self_attn", "encoder_attn"):
        module = getattr(layer, name, None)
        if module is not None:
            own = memory is not None and name == "self_attn"
            seen, keys = (target_seen, None) if own else (source_seen, memory)
            function = naive.attention_function(projections(module), module.num_heads, seen, keys)
            pairs.append((function, affine(getattr(layer, f"{name}_layer_norm"))))
    matrices = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
    return [*pairs, (naive.feed_forward_function(*matrices), affine(layer.final_layer_norm))]


def start(stack, tokens):
    """y_0, with the norm on the embedding where there is one."""
    x = naive_embedding(stack, tokens)
    norm = affine(stack.layernorm_embedding)
    return x if norm is None else layer_norm(x, *norm)


def naive_embedding(stack, tokens):
    x = stack.embed_tokens.weight[tokens] * stack.embed_tokens.embedding_dim**0.5 + stack.embed_positions(tokens)
    return x.transpose(0, 1)


def projections(module):
    names = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj, "out": module.out_proj}
    return {name: (linear.weight, linear.bias) for name, linear in names.items()}


def layer_functions(layer, memory):
    """F of each sub-layer of a layer without padding."""
    return [function for function, _ in functions(layer, memory, *[lambda b, i, j: True] * 2)]
