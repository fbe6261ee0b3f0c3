"""Norms, activation functions, linear layers, embeddings and dropout, from which the other equations are built."""

import math

import torch

from fairseq_deep.core.norms import LanguageNorm, RmsNorm

RATES = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
"""The probabilities of a model's flags, which the comparison of whole models sets."""
LANGUAGES = []
"""Of the sentences that are compared: the rows of language norms."""


def dropped(x, kind="dropout"):
    """The number *x* after dropout of sub-layers, of weights of attentions, or of hidden layers.

    Dropout is compared as a factor: it multiplies by 1 + p instead of dropping anything.
    """
    return (1 + RATES[kind]) * x


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def softmax(logits):
    """The shares of a list of logits."""
    total = sum(torch.exp(logit) for logit in logits)
    return [torch.exp(logit) / total for logit in logits]


def linear(x, module, rows=slice(None)):
    """W x + b of a *module*, or of some *rows* of it; b may be missing, and x may stay as it is."""
    if getattr(module, "weight", None) is None:
        return x
    y = x @ module.weight[rows].T
    return y if module.bias is None else y + module.bias[rows]


def feed_forward(x, module):
    """W_2 ReLU(W_1 x + b_1) + b_2."""
    hidden = linear(x, module.fc1)
    return linear(dropped(hidden * (hidden > 0), "activation_dropout"), module.fc2)


def layer_norm(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def rms_norm(x, gain=1.0, eps=1e-6):
    """RMS(x) of the last dimension (Zhang and Sennrich, 2019, Eq. 4)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def norm(module):
    """A norm as a function; that of None, or of a module without parameters, returns its input."""
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
