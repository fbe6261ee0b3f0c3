"""How weights start: every matrix of real models against the closed forms of the papers, and nothing else touched."""

import math
import re

import pytest
import torch

from fairseq_deep.core.inits import INITS
from fairseq_deep.plugin.architectures import build_architecture
from tests.helpers.inits import (
    CASES,
    DIM,
    FFN,
    FITTING,
    MATRIX,
    METHODS,
    STACKS,
    VOCAB,
    check_sample,
    expected,
)
from tests.helpers.models import make_dictionary

cases = pytest.mark.parametrize(
    "method, options", CASES, ids=["-".join([name, *map(str, flags.values())]) for name, flags in CASES]
)

NORM = re.compile(r"(encoder|decoder)\.(?:layers\.\d+\.)?\w*layer_?norm\w*\.(weight|bias)")


@pytest.fixture(scope="module")
def make():
    """make(name, **flags): a model of the architecture *name*, wide enough for the statistics of its matrices."""
    words = make_dictionary(VOCAB)
    sizes = {"encoder_embed_dim": DIM, "encoder_attention_heads": 2, "decoder_attention_heads": 2}

    def build(name, **flags):
        width = {} if "lstm" in name or "rnn" in name else {"encoder_ffn_embed_dim": FFN}
        return build_architecture(name, words, **{**sizes, **width, **flags})

    return build


def check_layers(model, methods, n, m):
    """Every parameter of the layers is what the *methods* {side: (name, options)} say; returns the matrices' names."""
    seen = set()
    one_width = model.encoder.embed_tokens.embedding_dim == model.decoder.embed_tokens.embedding_dim
    for name, value in model.named_parameters():
        found = MATRIX.fullmatch(name)
        if found is None:
            assert ".layers." not in name or NORM.fullmatch(name) or name.endswith(".residual.weight"), name
            continue
        side, index, part, role, kind = found.groups()
        method, options = methods[side]
        if kind == "weight":
            place = (side, int(index) + 1, part or "ffn", role)
            check_sample(name, value, *expected(method, options, *place, *value.shape, n, m, one_width))
            seen.add(place)
        elif method == "fairseq" and role != "out_proj":
            assert value.abs().min() > 0, name
        else:
            assert value.eq(0).all(), name
    return seen


def all_places(n, m):
    attention = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {
        (side, layer, part, role)
        for side, depth in (("encoder", n), ("decoder", m))
        for layer in range(1, depth + 1)
        for part, roles in (("self_attn", attention), ("encoder_attn", attention), ("ffn", ("fc1", "fc2")))
        for role in roles
        if (side, part) != ("encoder", "encoder_attn")
    }


def norms(model):
    return {name: value for name, value in model.named_parameters() if NORM.fullmatch(name)}


def check_norms(model):
    for name, value in norms(model).items():
        assert value.eq(1.0 if name.endswith("weight") else 0.0).all(), name


def test_every_method_is_tested():
    assert METHODS == INITS.names()


@cases
@pytest.mark.parametrize("n, m, width", [(6, 6, DIM), (18, 18, DIM), (9, 3, 96)])
def test_every_matrix_has_the_papers_distribution(method, options, n, m, width, make):
    """By side, layer (from 1 in each stack), part and role; the third model has stacks of different depth and width."""
    flags = {"encoder_layers": n, "decoder_layers": m, "decoder_embed_dim": width}
    model = make("transformer_postnorm_6l", deep_init=method, **options, **flags)
    sides = dict.fromkeys(("encoder", "decoder"), (method, options))
    assert check_layers(model, sides, n, m) == all_places(n, m)
    check_norms(model)
    assert len(norms(model)) == (0 if method in ("tfixup", "rezero") else 2 * (2 * n + 3 * m))


@pytest.mark.parametrize("method", sorted({"fairseq", "xavier", "lipschitz", "ds", "depth-scaled"}))
@pytest.mark.parametrize("name", ["transformer_prenorm_6l", "transformer_dlcl_6l"])
def test_norm_placement_and_aggregator_change_nothing(method, name, make):
    model = make(name, deep_init=method)
    assert check_layers(model, dict.fromkeys(("encoder", "decoder"), (method, {})), 6, 6) == all_places(6, 6)
    check_norms(model)


@pytest.mark.parametrize("side, other", [("encoder", "decoder"), ("decoder", "encoder")])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rest", [None, "lipschitz"])
def test_each_stack_can_have_its_own_method(method, side, other, rest, make):
    flags = {f"{side}_deep_init": method} if rest is None else {"deep_init": rest, f"{side}_deep_init": method}
    model = make("transformer_postnorm_6l", encoder_layers=4, decoder_layers=5, **flags)
    check_layers(model, {side: (method, {}), other: (rest or "fairseq", {})}, 4, 5)
    gone = (method in ("tfixup", "rezero")) * (16 if side == "encoder" else 30)
    assert len(norms(model)) == 16 + 30 - gone


def test_layers_that_layerdrop_would_skip_are_filled_too(make):
    flags = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    model = make("transformer_postnorm_6l", deep_init="ds", **flags)
    sides = dict.fromkeys(("encoder", "decoder"), ("ds", {}))
    assert check_layers(model, sides, 6, 6) == all_places(6, 6)


def table_size(method, options, side, n, m):
    """Distribution of an embedding of V x C entries, and its size."""
    if method == "lipschitz" and "lipschitz_embeddings" not in options:
        return "uniform", math.sqrt(2 / (DIM + VOCAB))
    factor = 1.0
    if method == "tfixup":
        factor = (9 * n) ** -0.25 if side == "encoder" else (9 * m) ** -0.25
    return "normal", factor / math.sqrt(DIM)


@cases
@pytest.mark.parametrize("share", ["nothing", "decoder", "all"])
def test_embeddings_and_output_projection(method, options, share, make):
    flags = {
        "nothing": {},
        "decoder": {"share_decoder_input_output_embed": True},
        "all": {"share_all_embeddings": True},
    }[share]
    model = make("transformer_postnorm_6l", encoder_layers=4, decoder_layers=2, deep_init=method, **options, **flags)
    source, target = model.encoder.embed_tokens, model.decoder.embed_tokens
    output, pad = model.decoder.output_projection, source.padding_idx
    words = [row for row in range(VOCAB) if row != pad]
    assert source.weight[pad].eq(0).all() and target.weight[pad].eq(0).all()
    check_sample("encoder", source.weight[words], *table_size(method, options, "encoder", 4, 2))
    assert (source.weight is target.weight) is (share == "all")
    assert (output.weight is target.weight) is (share != "nothing")
    if share != "all":
        check_sample("decoder", target.weight[words], *table_size(method, options, "decoder", 4, 2))
    if share == "nothing":
        alone = ("uniform", math.sqrt(1 / DIM)) if method == "lipschitz" else ("normal", math.sqrt(1 / DIM))
        check_sample("output", output.weight, *alone)
        assert output.weight[pad].ne(0).any()


@pytest.mark.parametrize("encoder, decoder", [("tfixup", "lipschitz"), ("lipschitz", "tfixup"), ("fairseq", "tfixup")])
def test_a_table_of_both_stacks_is_the_encoders(encoder, decoder, make):
    flags = {"encoder_deep_init": encoder, "decoder_deep_init": decoder, "share_all_embeddings": True}
    model = make("transformer_postnorm_6l", encoder_layers=4, decoder_layers=2, **flags)
    table = model.encoder.embed_tokens.weight
    assert model.decoder.output_projection.weight is table
    check_sample("table", torch.cat([table[:1], table[2:]]), *table_size(encoder, {}, "encoder", 4, 2))


def same_seed(make, name, seed=3, **flags):
    torch.manual_seed(seed)
    return make(name, encoder_layers=3, decoder_layers=2, **flags)


def aggregator_parameters(model):
    return {name: value for name, value in model.named_parameters() if ".history." in name}


FITS = [(method, name) for method in METHODS for name in STACKS if name in FITTING[method]]


@pytest.mark.parametrize("method, name", FITS)
def test_nothing_else_is_touched(method, name, make):
    """Aggregators keep their start values unless the method has a rule for them, and norms are 1 and 0."""
    plain = same_seed(make, name, **STACKS[name])
    model = same_seed(make, name, deep_init=method, **STACKS[name])
    has_matrices = "lstm" in name or "rnn" in name
    start = aggregator_parameters(plain)
    assert aggregator_parameters(model).keys() == start.keys()
    assert bool(start) is not (name in ("transformer_postnorm_6l", "transformer_prenorm_6l"))
    for key, value in aggregator_parameters(model).items():
        ruled = method == "lipschitz" and has_matrices and value.dim() == 2 and "norm" not in key
        assert torch.equal(value, start[key]) is not ruled, key
    check_norms(model)


@pytest.mark.parametrize("name", STACKS)
def test_fairseq_touches_nothing(name, make):
    plain, model = (same_seed(make, name, **STACKS[name], **flags) for flags in ({}, {"deep_init": "fairseq"}))
    before = dict(plain.named_parameters())
    assert plain.state_dict().keys() == model.state_dict().keys()
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("method, name", FITS)
def test_equal_seeds_give_equal_models(method, name, make):
    first, again, other = (
        dict(same_seed(make, name, seed, deep_init=method, **STACKS[name]).named_parameters()) for seed in (3, 3, 4)
    )
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    for key, value in first.items():
        if MATRIX.fullmatch(key) and key.endswith("weight") or key.endswith("embed_tokens.weight"):
            assert not torch.equal(value, other[key]), key


@pytest.mark.parametrize(
    "flags, matrices",  # of both stacks: gates x 3, and 2 (or 1) a layer in the hidden computation
    [({}, 6 + 24), ({"lstm_share": "none", "lstm_ffn": 1}, 36 + 12), ({"layer_agg": "rnn"}, 24)],
    ids=str,
)
def test_lipschitz_has_a_rule_for_the_matrices_of_an_aggregator(flags, matrices, make):
    """Each gate is a matrix of its own, and relative positions have the rule of embeddings."""
    model = make("transformer_lstm_6l", deep_init="lipschitz", relative_positions=60, **flags)
    found = 0
    for key, value in aggregator_parameters(model).items():
        if value.dim() == 2 and "norm" not in key:
            for matrix in value.chunk(3) if "gates" in key else [value]:
                check_sample(key, matrix, "uniform", math.sqrt(1 / matrix.size(1)))
                found += 1
    assert found == matrices
    for layer in (*model.encoder.layers, *model.decoder.layers):
        keys = layer.self_attn.relative_keys
        check_sample("relative keys", keys, "uniform", math.sqrt(2 / sum(keys.shape)))


@pytest.mark.parametrize("decoder", ["lipschitz", "xavier"])
def test_gates_of_both_stacks_are_the_encoders(decoder, make):
    """Where the encoder is left alone, so are they."""
    plain = same_seed(make, "transformer_lstm_6l", lstm_share="gate-encdec")
    model = same_seed(make, "transformer_lstm_6l", lstm_share="gate-encdec", decoder_deep_init=decoder)
    assert model.encoder.aggregator.gates[0].weight is model.decoder.aggregator.gates[0].weight
    assert torch.equal(model.encoder.aggregator.gates[0].weight, plain.encoder.aggregator.gates[0].weight)
    model = same_seed(make, "transformer_lstm_6l", lstm_share="gate-encdec", encoder_deep_init="lipschitz")
    for gate in model.encoder.aggregator.gates[0].weight.chunk(3):
        check_sample("gate", gate, "uniform", math.sqrt(1 / (2 * DIM)))
