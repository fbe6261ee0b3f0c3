"""Initialisations: the cases of each, whose values are in ``tests/snapshots/initial.txt``; what is drawn."""

import contextlib
from unittest import mock

import torch

from fairseq_deep.core.inits import INITS
from tests.helpers.decoder_attention import KINDS, LUNA
from tests.helpers.methods import DLCL, LSTM, METHODS, named
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
    *({"deep_init": "xavier", **kind} for kind in KINDS.values() if kind),
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


class Draws(contextlib.ExitStack):
    """Notes what is drawn within it: "uniform" with its bound, or "normal" with its standard deviation."""

    def __enter__(self):
        self.found = {}  # by address; tensors are kept, so that no address is used twice
        for name in ("uniform_", "normal_"):
            draw = getattr(torch.Tensor, name)
            noted = lambda tensor, *args, draw=draw, **options: self.note(draw, tensor, *args, **options)  # noqa: E731
            self.enter_context(mock.patch.object(torch.Tensor, name, noted))
        return super().__enter__()

    def note(self, draw, tensor, low=0.0, size=1.0, **options):
        for address in self.within(tensor):
            del self.found[address]
        self.found[tensor.data_ptr()] = (draw.__name__[:-1], size), tensor
        return draw(tensor, low, size, **options)

    def within(self, tensor):
        start = tensor.data_ptr()
        return [address for address in self.found if start <= address < start + tensor.nbytes]

    def of(self, parameter):
        """What all entries of *parameter* have been drawn from, or the few values that it has."""
        values, drawn = parameter.detach().unique(), [self.found[address] for address in self.within(parameter)]
        largest, kinds = values.abs().max(), {draw for draw, _ in drawn}
        covered = sum(part.numel() for _, part in drawn) == parameter.numel() < 2 * len(values)
        if covered and all(0 < largest <= size * (1 + 1e-6 if name == "uniform" else 6) for name, size in kinds):
            ((distribution, size),) = kinds
            assert len(values) < 64 or largest > size / 2, "scaled after it was drawn"
            return distribution, size
        assert len(values) <= 8, "neither drawn nor constant"
        return (*values.tolist(),)


def initial_values(make):
    """The model that *make* builds, and the initial values of each parameter by name."""
    with Draws() as draws:
        model = make()
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None]
    assert not any(table.weight[table.padding_idx].any() for table in tables), "vectors of padding are 0"
    return model, {name: draws.of(parameter) for name, parameter in model.named_parameters()}
