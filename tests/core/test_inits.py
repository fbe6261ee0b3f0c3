"""How weights start (--deep-init): every matrix against the papers' closed forms, connections, what stays untouched."""

import math
import re

import pytest
import torch

from fairseq_deep.core.inits import INITS
from fairseq_deep.core.inits import MatrixLocation as Place
from fairseq_deep.core.inits.admin import omega
from fairseq_deep.core.inits.deepnet import DeepNet
from fairseq_deep.core.inits.ds import DepthScaled
from fairseq_deep.core.inits.tfixup import TFixup
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.architectures import ARCHITECTURES, build_architecture, stored_count
from tests.helpers.equations import affine, functions, start
from tests.helpers.flags import one_line, parse
from tests.helpers.inits import CASES, DIM, FFN, FITTING, MATRIX, METHODS, STACKS, VOCAB, check_sample, expected
from tests.helpers.models import POSTNORM, make_dictionary, size_of
from tests.helpers.tensors import assert_same_gradients, shake
from tests.reference import naive_connections as naive
from tests.reference.naive_dlcl import layer_norm, run_stack

POST = "transformer_postnorm_6l"
SIDES = ("encoder", "decoder")
NORM = re.compile(r"(encoder|decoder)\.(?:layers\.\d+\.)?\w*layer_?norm\w*\.(weight|bias)")
NO_NORMS = ("tfixup", "rezero")


@pytest.fixture(scope="module")
def make():
    """make(name, **flags): a model of the architecture *name*, wide enough for the statistics of its matrices."""
    words = make_dictionary(VOCAB)
    sizes = {"encoder_embed_dim": DIM, "encoder_attention_heads": 2, "decoder_attention_heads": 2}

    def build(name, **flags):
        width = {} if "lstm" in name or "rnn" in name else {"encoder_ffn_embed_dim": FFN}
        return build_architecture(name, words, **{**sizes, **width, **flags})

    return build


# --- matrices of layers ---


def check_layers(model, methods, n, m):
    """Every parameter of the layers is what the *methods* {side: (name, options)} say; returns the matrices' places."""
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


def check_norms(model):
    norms = {name: value for name, value in model.named_parameters() if NORM.fullmatch(name)}
    for name, value in norms.items():
        assert value.eq(1.0 if name.endswith("weight") else 0.0).all(), name
    return len(norms)


LAYERDROP = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
PLACED = [(POST, 9, 3, 96, method, options) for method, options in CASES]
PLACED += [(POST, 18, 18, DIM, *CASES[4]), (POST, 6, 6, DIM, "ds", LAYERDROP)]
PLACED += [("transformer_prenorm_6l", 6, 6, DIM, name, {}) for name in ("fairseq", "xavier", "lipschitz", "ds")]
PLACED += [("transformer_dlcl_6l", 6, 6, DIM, "depth-scaled", {})]


def test_every_method_is_tested():
    assert METHODS == INITS.names()


@pytest.mark.parametrize("name, n, m, width, method, options", PLACED)
def test_every_matrix_has_the_papers_distribution(name, n, m, width, method, options, make):
    """By side, layer (from 1 in each stack), part and role; in stacks of different depth and width."""
    sizes = {"encoder_layers": n, "decoder_layers": m, "decoder_embed_dim": width}
    model = make(name, deep_init=method, **options, **sizes)
    assert check_layers(model, dict.fromkeys(SIDES, (method, options)), n, m) == all_places(n, m)
    norms = check_norms(model)
    assert name != POST or norms == (0 if method in NO_NORMS else 2 * (2 * n + 3 * m))


@pytest.mark.parametrize("side, other", [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("method", METHODS)
def test_each_stack_can_have_its_own_method(method, side, other, make):
    rest = "lipschitz" if method == "fairseq" else "fairseq"
    model = make(POST, encoder_layers=4, decoder_layers=5, deep_init=rest, **{f"{side}_deep_init": method})
    check_layers(model, {side: (method, {}), other: (rest, {})}, 4, 5)
    assert check_norms(model) == 16 + 30 - (method in NO_NORMS) * (16 if side == "encoder" else 30)


def stack(side, n, m):
    """One of the stacks of a model with n encoder and m decoder layers."""
    layers, other = (n, m) if side == "encoder" else (m, n)
    return Stack(layers, 16, pre_norm=False, side=side, other_layers=other)


def test_constants_are_the_published_ones():
    """To four decimals; the closed forms of the tests' reference are the same as the package's."""
    deepnet = [(6, 6, "encoder", 1.4179, 0.4970), (6, 6, "decoder", 2.0598, 0.3433)]
    deepnet += [(30, 6, "encoder", 2.1203, 0.3324), (100, 100, "decoder", 4.1618, 0.1699)]
    for n, m, side, alpha, beta in deepnet:
        init = DeepNet(stack(side, n, m))
        assert (init.alpha, init.beta) == (pytest.approx(alpha, abs=5e-5), pytest.approx(beta, abs=5e-5))
    for connections, value in ((12, 2.0170), (18, 2.3351), (36, 3.0408), (90, 4.3788)):
        assert omega("logn", connections) == pytest.approx(value, abs=5e-5)
    for n, m, side, factor in ((6, 6, "encoder", 0.4281), (6, 6, "decoder", 0.3689), (30, 6, "encoder", 0.2863)):
        assert TFixup(stack(side, n, m)).gain(Place(1, "self_attn", "v_proj")) == pytest.approx(factor, abs=5e-5)
    for options, value in (({}, 0.6389), ({"exponent": 0.5}, 0.4082)):
        init = DepthScaled(stack("decoder", 6, 6), **options)
        assert init.gain(Place(6, "ffn", "fc1")) == pytest.approx(value, abs=5e-5)
    weight = torch.empty(512, 512)
    for method, role, part, bound in (("xavier", "q_proj", "self_attn", 0.0541), ("lipschitz", "fc1", "ffn", 0.0442)):
        INITS.get(method)(stack("encoder", 6, 6)).matrix(weight, Place(1, part, role))
        assert float(weight.abs().max()) == pytest.approx(bound, abs=6e-5)


# --- tables ---


def table_size(method, options, side, n, m):
    """Distribution of an embedding of V x C entries, and its size."""
    if method == "lipschitz" and "lipschitz_embeddings" not in options:
        return "uniform", math.sqrt(2 / (DIM + VOCAB))
    factor = 1.0
    if method == "tfixup":
        factor = (9 * n) ** -0.25 if side == "encoder" else (9 * m) ** -0.25
    return "normal", factor / math.sqrt(DIM)


@pytest.mark.parametrize("method, options", CASES, ids=str)
@pytest.mark.parametrize("share", [{}, {"share_decoder_input_output_embed": True}, {"share_all_embeddings": True}])
def test_embeddings_and_output_projection(method, options, share, make):
    model = make(POST, encoder_layers=4, decoder_layers=2, deep_init=method, **options, **share)
    source, target = model.encoder.embed_tokens, model.decoder.embed_tokens
    output, pad = model.decoder.output_projection, source.padding_idx
    words = [row for row in range(VOCAB) if row != pad]
    assert source.weight[pad].eq(0).all() and target.weight[pad].eq(0).all()
    check_sample("encoder", source.weight[words], *table_size(method, options, "encoder", 4, 2))
    assert (source.weight is target.weight) is ("share_all_embeddings" in share)
    assert (output.weight is target.weight) is bool(share)
    if "share_all_embeddings" not in share:
        check_sample("decoder", target.weight[words], *table_size(method, options, "decoder", 4, 2))
    if not share:
        alone = ("uniform", math.sqrt(1 / DIM)) if method == "lipschitz" else ("normal", math.sqrt(1 / DIM))
        check_sample("output", output.weight, *alone)
        assert output.weight[pad].ne(0).any()


@pytest.mark.parametrize("encoder, decoder", [("tfixup", "lipschitz"), ("lipschitz", "tfixup"), ("fairseq", "tfixup")])
def test_a_table_of_both_stacks_is_the_encoders(encoder, decoder, make):
    flags = {"encoder_deep_init": encoder, "decoder_deep_init": decoder, "share_all_embeddings": True}
    model = make(POST, encoder_layers=4, decoder_layers=2, **flags)
    table = model.encoder.embed_tokens.weight
    assert model.decoder.output_projection.weight is table
    check_sample("table", torch.cat([table[:1], table[2:]]), *table_size(encoder, {}, "encoder", 4, 2))


@pytest.mark.parametrize("sides", [("encoder",), SIDES], ids="+".join)
def test_pretrained_embeddings_stay(sides, build, dictionary, tmp_path):
    path = tmp_path / "vectors.txt"
    lines = [f"{word} " + " ".join(["7.0"] * 16) for word in dictionary.symbols]
    path.write_text(f"{len(lines)} 16\n" + "\n".join(lines) + "\n")
    model = build(POSTNORM, deep_init="lipschitz", **{f"{side}_embed_path": str(path) for side in sides})
    for side in SIDES:
        table = getattr(model, side).embed_tokens.weight
        assert bool((table[dictionary.nspecial :] == 7.0).all()) == (side in sides)
        assert float(getattr(model, side).layers[0].fc1.bias.abs().max()) == 0.0


def test_learned_positions_have_the_rule_of_embeddings(build):
    model = build(POSTNORM, deep_init="lipschitz", encoder_learned_pos=True, max_source_positions=500)
    table = model.encoder.embed_positions
    check_sample("positions", table.weight[table.padding_idx + 1 :], "uniform", (2 / sum(table.weight.shape)) ** 0.5)
    assert float(table.weight[table.padding_idx].abs().max()) == 0.0


# --- aggregators, and what must not change ---


def same_seed(make, name, seed=3, **flags):
    torch.manual_seed(seed)
    return make(name, encoder_layers=3, decoder_layers=2, **flags)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STACKS)
def test_nothing_else_is_touched_and_the_seed_decides(method, name, make):
    """Aggregators keep their start unless the method has a rule for them; other stacks are refused."""
    if name not in FITTING[method]:
        with pytest.raises(UsageError) as error:
            make(name, deep_init=method, **STACKS[name])
        assert f"--deep-init {method}" in one_line(error) and "use " in one_line(error)
        return
    kinds = ({"seed": 3}, {"seed": 4}, {"seed": 3})
    first, other, again = (same_seed(make, name, **kind, deep_init=method, **STACKS[name]) for kind in kinds)
    check_norms(first)
    plain = dict(same_seed(make, name, **STACKS[name]).named_parameters())
    for key, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(key)), key
        if MATRIX.fullmatch(key) and key.endswith("weight") or key.endswith("embed_tokens.weight"):
            assert not torch.equal(value, other.get_parameter(key)), key
        has_matrices = ("lstm" in name or "rnn" in name) and value.dim() == 2 and "norm" not in key
        if method == "fairseq" or ".history." in key:
            assert torch.equal(value, plain[key]) is not (method == "lipschitz" and has_matrices), key


@pytest.mark.parametrize(
    "flags, matrices",  # of both stacks: gates x 3, and 2 (or 1) a layer in the hidden computation
    [({}, 6 + 24), ({"lstm_share": "none", "lstm_ffn": 1}, 36 + 12), ({"layer_agg": "rnn"}, 24)],
    ids=str,
)
def test_lipschitz_has_a_rule_for_the_matrices_of_an_aggregator(flags, matrices, make):
    """Each gate is a matrix of its own, and relative positions have the rule of embeddings."""
    model = make("transformer_lstm_6l", deep_init="lipschitz", relative_positions=60, **flags)
    found = 0
    for key, value in model.named_parameters():
        if ".history." in key and value.dim() == 2 and "norm" not in key:
            for matrix in value.chunk(3) if "gates" in key else [value]:
                check_sample(key, matrix, "uniform", math.sqrt(1 / matrix.size(1)))
                found += 1
    assert found == matrices
    for layer in (*model.encoder.layers, *model.decoder.layers):
        keys = layer.self_attn.relative_keys
        check_sample("relative keys", keys, "uniform", math.sqrt(2 / sum(keys.shape)))


def test_gates_of_both_stacks_are_the_encoders(make):
    """Where the encoder is left alone, so are they."""
    plain, of_decoder, of_encoder = (
        same_seed(make, "transformer_lstm_6l", lstm_share="gate-encdec", **flags).encoder.aggregator.gates[0].weight
        for flags in ({}, {"decoder_deep_init": "lipschitz"}, {"encoder_deep_init": "lipschitz"})
    )
    assert torch.equal(of_decoder, plain)
    for gate in of_encoder.chunk(3):
        check_sample("gate", gate, "uniform", math.sqrt(1 / (2 * DIM)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("flags", [{"encoder_ffn_embed_dim": 0}, {"encoder_layers": 0}, {"decoder_layers": 0}], ids=str)
def test_what_is_empty_is_built_or_refused(method, flags, build, batch):
    """fairseq builds it; some constants have a depth or a width in the denominator."""
    try:
        model = build(POSTNORM, deep_init=method, **flags)
    except UsageError as error:
        assert "-layers 0" in str(error) and "\n" not in str(error)
    else:
        assert model(*batch)[0].isfinite().all()


# --- connections ---

N, M = 2, 3
DEPTH = {"encoder_layers": N, "decoder_layers": M}


def layer_function(layer, side, method, pre_norm, *seen):
    """A whole layer as a function of its input."""
    sublayers = []
    for index, (function, norm) in enumerate(functions(layer, *seen)):
        factor = naive.deepnet_alpha(side, N, M) if method == "deepnet" else None
        if method in ("admin", "rezero"):
            factor = layer.residual.weight[index if method == "admin" else 0]
        sublayers.append((function, naive.connect(method if factor is not None else "plain", factor), norm))
    return lambda x: naive.run_sublayers(x, sublayers, pre_norm)


def naive_scores(model, source, target, method, pre_norm):
    """Scores (B x T x V) of a model of the narrow architectures, from the equations alone."""
    pad, memory = model.encoder.padding_idx, None

    def seen(b, i, j):
        return source[b, j] != pad

    def earlier(b, i, j):
        return j <= i and target[b, j] != pad

    for side, tokens in (("encoder", source), ("decoder", target)):
        stack = getattr(model, side)
        x = start(stack, tokens)
        if side == "encoder":
            x = x.masked_fill(source.eq(pad).T.unsqueeze(-1), 0.0)
        layers = [layer_function(layer, side, method, pre_norm, memory, seen, earlier) for layer in stack.layers]
        if hasattr(stack.aggregator, "weight"):
            norms = [affine(norm) for norm in stack.aggregator.layer_norms]
            x = run_stack(x, layers, stack.aggregator.weight.unsqueeze(-1), norms, pre_norm)
        else:
            for layer in layers:
                x = layer(x)
        norm = affine(stack.layer_norm)
        memory = x = x if norm is None else layer_norm(x, *norm)
    return x.transpose(0, 1) @ model.decoder.output_projection.weight.T


@pytest.mark.parametrize("method", ["lipschitz", "deepnet", "admin", "tfixup", "rezero", "deepnet dlcl", "admin dlcl"])
def test_scores_and_gradients_equal_the_equations(method, build, batch):
    """Of whole models; with a norm on the embedding where the method has one."""
    name = "transformer_dlcl_postnorm_2l2l_tiny" if "dlcl" in method else POSTNORM
    method = method.split()[0]
    model = build(name, deep_init=method, layernorm_embedding=method == "lipschitz", **DEPTH).double()
    shake(model, 0.5 if affine(model.encoder.layers[0].final_layer_norm) else 0.12)
    source, lengths, target = batch
    words = target.ne(model.decoder.padding_idx)
    expected = naive_scores(model, source, target, method, pre_norm=False)[words]
    actual = model(source, lengths, target)[0][words]
    # the weights of the last attention, which fairseq asks for, are of fp32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(actual, expected, list(model.parameters()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_method_adds_and_removes(method, build):
    model, norms = build(POSTNORM, deep_init=method, **DEPTH), 2 * 16 * (2 * N + 3 * M)
    added = {"admin": norms // 2, "rezero": N + M - norms, "tfixup": -norms}.get(method, 0)
    assert size_of(model) - size_of(build(POSTNORM, **DEPTH)) == added
    weights = {name: tuple(value.shape) for name, value in model.named_parameters() if "residual" in name}
    shapes = {"admin": ((2, 16), (3, 16)), "rezero": ((1,), (1,))}.get(method, ())
    layers = [(side, layer, shape) for side, shape in zip(SIDES, shapes) for layer in range(DEPTH[f"{side}_layers"])]
    assert weights == {f"{side}.layers.{layer}.residual.weight": shape for side, layer, shape in layers}


def test_rezero_starts_as_the_identity(build, batch):
    """Over the whole depth: what comes out is the embedding, and only the gates and the tables move at first."""
    model = build(POSTNORM, encoder_layers=30, decoder_layers=30, deep_init="rezero").train()
    source, lengths, target = batch
    encoder_out = model.encoder(source, lengths)
    embedded = start(model.encoder, source).masked_fill(source.eq(model.encoder.padding_idx).T.unsqueeze(-1), 0.0)
    torch.testing.assert_close(encoder_out["encoder_out"][0], embedded)
    output, extra = model.decoder(target, encoder_out=encoder_out)
    assert all(torch.equal(state, extra["inner_states"][0]) for state in extra["inner_states"])
    output.square().mean().backward()
    for name, parameter in model.named_parameters():
        moves = "residual" in name and "decoder" in name or "embed" in name or "output" in name
        assert bool(parameter.grad.any()) is (moves and "encoder.embed" not in name), name


# --- the papers' systems ---

COUNTS = {
    "transformer_lipschitz_postnorm_18l18l": 150659072,
    "transformer_ds_20l20l": 175299584,
    "transformer_deepnet_18l18l": 61566976 + 12 * 7356416,  # 12 pairs of an encoder and a decoder layer more
    "transformer_admin_18l18l": 61566976 + 12 * 7356416 + 18 * 5 * 512,
}
INITIALISED = [
    name
    for name, row in ARCHITECTURES.items()
    if row.chosen["deep_init"] not in ("fairseq", "xavier") and row.chosen["residual"] == "plain"
]


@pytest.mark.parametrize("name", INITIALISED)
def test_presets_and_counts_are_the_published_ones(name):
    assert stored_count(name) == COUNTS.get(name, stored_count(name))
    args, method = parse("--arch", name), name.split("_")[1]
    pre_norm = method == "lipschitz" and "_postnorm" not in name
    assert (args.deep_init, args.layer_agg) == (method, "residual")
    assert (bool(args.encoder_normalize_before), bool(args.decoder_normalize_before)) == (pre_norm, pre_norm)
    assert bool(args.layernorm_embedding) is (method == "lipschitz" and not pre_norm)
    dropouts = (0.1, 0.1, 0.1) if method != "ds" or name.endswith("_6l") else (0.3, 0.2, 0.1)
    if "_matt_" in name:
        assert args.decoder_attn == "merged"
        dropouts = {"big": (0.3, 0.1, 0.1), "iwslt": (0.5, 0.3, 0.1)}.get(name.split("_")[-1], dropouts)
    assert (args.dropout, args.attention_dropout, args.activation_dropout) == dropouts
    assert parse("--arch", name, "--deep-init", "xavier").deep_init == "xavier"
    other = parse("--arch", name, "--layer-agg", "dlcl")  # takes only the options of the row's aggregator with it
    assert {flag: value for flag, value in vars(other).items() if flag != "layer_agg"} == {
        flag: value for flag, value in vars(args).items() if flag != "layer_agg"
    }
