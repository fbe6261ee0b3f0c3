"""Dropout as a factor: what is left of a number whose dropout multiplies by 1 + p instead of dropping it."""

RATES = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
"""The probabilities of a model's flags, which the comparison of whole models sets."""


def dropped(x, kind="dropout"):
    """The number *x* after dropout of sub-layers, of weights of attentions, or of hidden layers."""
    return (1 + RATES[kind]) * x
