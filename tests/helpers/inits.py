"""Initialisations: the cases of each, whose values are in ``tests/snapshots/initial.txt``, and how they are found."""

import math
from unittest import mock

import torch

from fairseq_deep.core.inits import INITS
from tests.helpers.methods import DLCL, KINDS, LSTM, LUNA, METHODS, named
from tests.helpers.models import POSTNORM

SIDES = ("encoder", "decoder")
# the options that change a number, and the attentions with matrices of their own
RULES = [
    *({"deep_init": method} for method in INITS.names()),
    {"deep_init": "lipschitz", "lipschitz_embeddings": "normal"},
    {"deep_init": "ds", "ds_init_exponent": 0.5},
    {"deep_init": "ds", "ds_init_exponent": 0.5, "ds_init_split_qkv": True},
    {"deep_init": "ds", "ds_init_exponent": 0.0, "ds_init_alpha": 0.5},
    {"deep_init": "ds", "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
    {"deep_init": "depth-scaled", "depth_scaled_kind": "gpt2"},
    *({"deep_init": "admin", "admin_start": start} for start in ("1", "n", "profile")),
    {"deep_init": "xavier", "decoder_embed_dim": 24},
    # matrices of merged attentions are separate: Xavier's gamma is sqrt(6 / 2C), not that of a fused matrix
    *({"deep_init": "xavier", **kind} for name, kind in KINDS.items() if name != "self"),
    *({"deep_init": method, **KINDS["merged"]} for method in ("fairseq", "lipschitz", "ds", "admin")),
    *({"deep_init": method, **KINDS[kind]} for method in ("deepnet", "tfixup") for kind in ("average-ffn", "ssru")),
    *({"deep_init": "depth-scaled", "depth_scaled_kind": "gpt2", **KINDS[kind]} for kind in ("merged", "average-ffn")),
    *({"deep_init": method, **LUNA} for method in ("xavier", "ds", "lipschitz")),
    *({"deep_init": method, "layer_agg": "dlcl"} for method in INITS.names() if method not in ("tfixup", "rezero")),
    {"deep_init": "lipschitz", "encoder_learned_pos": True, "relative_positions": 6},
]
CASES = named(
    [
        *((POSTNORM, {"encoder_layers": 2, "decoder_layers": 3, **flags}) for flags in RULES),
        *((DLCL, {"dlcl_init": "one", "dlcl_window": window}) for window in (1, 3)),
        *((arch, {"deep_init": "lipschitz", **flags}) for arch, flags in METHODS.values()
          if {"layer_agg", "decoder_memory"} & {*flags}),
        (LSTM, {"lstm_forget_bias": 2.0}),
        *((LSTM, {"lstm_share": "gate-encdec", f"{side}_deep_init": "lipschitz"}) for side in SIDES),
    ]
)  # fmt: skip


def alternate(tensor, first, second):
    """Two values in turn."""
    return tensor.copy_(torch.where(torch.arange(tensor.numel()).view(tensor.shape) % 2 == 0, first, second))


def start_of(parameter):
    """The distribution of *parameter*, with its bound or its standard deviation; or the few values that it has."""
    values = parameter.detach().unique()
    assert len(values) <= 8, "neither drawn nor constant"
    drawn = values[values != 0].tolist()  # vectors of padding are 0
    for name, ratio in (("uniform", 1), ("normal", 3)):
        if len(drawn) == 2 and math.isclose(drawn[0], -ratio * drawn[1], rel_tol=1e-6):
            return name, drawn[1]
    return (*values.tolist(),)


def initial_values(make):
    """The model that *make* builds, and the initial values of each parameter by name.

    In place of a draw, entries are its bounds, or one standard deviation above and three below the mean.
    """
    with mock.patch.multiple(
        torch.Tensor,
        uniform_=lambda tensor, low=0.0, high=1.0, **_: alternate(tensor, low, high),
        normal_=lambda tensor, mean=0.0, std=1.0, **_: alternate(tensor, mean + std, mean - 3 * std),
    ):
        model = make()
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None]
    assert not any(table.weight[table.padding_idx].any() for table in tables), "vectors of padding are 0"
    return model, {name: start_of(parameter) for name, parameter in model.named_parameters()}
