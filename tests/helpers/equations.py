"""Parts of our models as the functions and tensors that the naive forms take."""

import itertools

import torch

from fairseq_deep.core.aggregators.lstm import DepthwiseLstm
from fairseq_deep.core.norms import LanguageNorm, RmsNorm
from tests.reference.naive_attention import rms_norm
from tests.reference.naive_dlcl import layer_norm


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
    return norm(stack.layernorm_embedding)(x)


def projections(module, names=("q", "k", "v", "out")):
    """Matrix and bias of each; packing has no output matrix."""
    linears = {name: getattr(module, f"{name}_proj") for name in names}
    identity = torch.eye(len(module.v_proj.weight)).double(), None
    return {name: (linear.weight, linear.bias) if hasattr(linear, "weight") else identity
            for name, linear in linears.items()}  # fmt: skip


def named_step(aggregator, gates, hidden):
    """The parameters of one step by their names in the equations, from the modules with these indices."""
    hidden = aggregator.hidden[hidden]
    step = {
        "W_h1": hidden.fc1.weight,
        "LN_h": (hidden.layer_norm.weight, hidden.layer_norm.bias),
        "W_h2": None if hidden.fc2 is None else hidden.fc2.weight,
    }
    for name, linear in (("b_h1", hidden.fc1), ("b_h2", hidden.fc2)):
        if linear is not None and linear.bias is not None:
            step[name] = linear.bias
    if gates is not None:
        dim, gates = aggregator.dim, aggregator.gates[gates]
        for row, gate in enumerate("ifo"):
            step[f"W_{gate}"] = gates.weight[row * dim : (row + 1) * dim]
            if gates.bias is not None:
                step[f"b_{gate}"] = gates.bias[row * dim : (row + 1) * dim]
            step[f"LN_{gate}"] = gates.norm_weight[row], gates.norm_bias[row]
    return step


def named_steps(aggregator, share, places):
    """Those of all steps, for the sharing mode and the number of steps a layer."""
    gated = type(aggregator) is DepthwiseLstm
    steps = []
    for layer, place in itertools.product(range(aggregator.num_layers // places), range(places)):
        own, common = layer * places + place, place
        gates = own if share == "none" else common
        steps.append(named_step(aggregator, gates if gated else None, common if share == "all" else own))
    return steps
