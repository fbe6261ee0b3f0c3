"""Initialisations: the cases of each, the closed forms of the papers, and models wide enough to see them."""

import math
import re

import pytest

from tests.reference.naive_connections import deepnet_beta, tfixup_factor

VOCAB = 400
DIM, FFN = 64, 128
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


def check_sample(name, weight, distribution, size):
    """*weight* looks drawn from the distribution: its range, its mean and, within 5 %, its standard deviation."""
    weight = weight.detach().double()
    deviation = size / math.sqrt(3) if distribution == "uniform" else size
    assert abs(float(weight.mean())) < 5 * deviation / math.sqrt(weight.numel()), name
    assert float(weight.std()) == pytest.approx(deviation, rel=0.05), name
    if distribution == "uniform":
        assert 0.97 * size < float(weight.abs().max()) <= size * (1 + 1e-6), name
    else:
        assert float(weight.abs().max()) > 2.5 * size, f"{name} is not normal"
