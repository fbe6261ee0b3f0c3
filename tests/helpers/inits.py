"""Initialisations: the cases of each, the closed forms of the papers, and what is drawn for each parameter."""

import contextlib
import math
import re
from unittest import mock

import torch

from tests.reference.naive_connections import deepnet_beta, tfixup_factor

# every method with the options that change a number
CASES = [
    ("fairseq", {}),
    ("xavier", {}),
    ("lipschitz", {}),
    ("lipschitz", {"lipschitz_embeddings": "normal"}),
    ("ds", {}),
    ("ds", {"ds_init_exponent": 0.5}),
    ("ds", {"ds_init_exponent": 0.5, "ds_init_split_qkv": True}),
    ("ds", {"ds_init_alpha": 0.5, "ds_init_exponent": 0.0}),
    ("deepnet", {}),
    ("admin", {}),
    ("admin", {"admin_start": "profile"}),
    ("tfixup", {}),
    ("rezero", {}),
    ("depth-scaled", {}),
    ("depth-scaled", {"depth_scaled_kind": "gpt2"}),
]
METHODS = sorted({method for method, _ in CASES})
MATRIX = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(?:(self_attn|encoder_attn)\.)?(\w+_proj|fc\d)\.(weight|bias)")


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
    return model, {name: draws.of(parameter) for name, parameter in model.named_parameters()}


def stock(role, part, fan_out, fan_in, one_width):
    """fairseq's start, without ``--deep-init``; stacks of different width lose a factor in what connects them."""
    if role.startswith("fc"):
        return "uniform", math.sqrt(1 / fan_in)
    fused = role != "out_proj" and (part == "self_attn" or one_width)
    return "uniform", math.sqrt(6 / (fan_in + fan_out)) * (math.sqrt(0.5) if fused else 1)


def expected(method, options, side, layer, part, role, fan_out, fan_in, n, m, one_width):
    """Distribution of a matrix, and its bound ("uniform") or standard deviation ("normal")."""
    gamma = math.sqrt(6 / (fan_in + fan_out))
    paper = math.sqrt(6 / (4 * fan_in)) if part == "self_attn" and role in ("q_proj", "k_proj", "v_proj") else gamma
    scaled = role in ("v_proj", "out_proj", "fc1", "fc2")
    if method == "fairseq":
        return stock(role, part, fan_out, fan_in, one_width)
    if method in ("xavier", "admin", "rezero"):
        return "uniform", paper
    if method == "lipschitz":
        return "uniform", math.sqrt(1 / fan_in)
    if method == "ds":
        paper = gamma if options.get("ds_init_split_qkv") else paper
        return "uniform", paper * options.get("ds_init_alpha", 1.0) / layer ** options.get("ds_init_exponent", 0.25)
    if method == "deepnet":
        return "normal", math.sqrt(2 / (fan_in + fan_out)) * (deepnet_beta(side, n, m) if scaled else 1)
    if method == "tfixup":
        return "uniform", gamma * (tfixup_factor(side, n, m) if scaled else 1 if part is None else math.sqrt(0.5))
    if options.get("depth_scaled_kind") == "gpt2":
        connections = 2 * n if side == "encoder" else 3 * m
        return "normal", 0.02 / math.sqrt(connections) if role in ("out_proj", "fc2") else 0.02
    assert method == "depth-scaled"
    return "uniform", gamma / math.sqrt(layer)
