"""Initial weights (--deep-init): every matrix against the papers' closed forms; connections; untouched parameters.

Presets and counts of the papers' systems are in ``test_counts.py``, the equations in ``test_whole_models.py``.
"""

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
from fairseq_deep.plugin.architectures import build_architecture
from tests.helpers.decoder_attention import KINDS
from tests.helpers.equations import start
from tests.helpers.inits import CASES, DIM, FFN, MATRIX, METHODS, VOCAB, check_sample, expected
from tests.helpers.methods import METHODS as ALL
from tests.helpers.methods import OPTIONS
from tests.helpers.models import POSTNORM, make_dictionary, size_of
from tests.helpers.tensors import is_uniform
from tests.reference.naive_connections import admin_omega

POST = "transformer_postnorm_6l"
SIDES = ("encoder", "decoder")
NORM = re.compile(r"(encoder|decoder)\.(?:layers\.\d+\.)?\w*layer_?norm\w*\.(weight|bias)")
NO_NORMS = ("tfixup", "rezero")
OWN = {"self": 4, "average": 1, "ssru": 2, "merged": 0, "merged-self": 4, "merged-average": 1}  # matrices of a layer
LIKE = {"gate": "q_proj", "input_proj": "v_proj", "fc1": "fc1", "fc2": "fc2"}  # have the rule of these, in no fused one


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


def check_layers(model, methods, n, m, kind="self"):
    """All parameters of the layers are what the *methods* {side: (name, options)} say; the numbers of matrices."""
    one_width = model.encoder.embed_tokens.embedding_dim == model.decoder.embed_tokens.embedding_dim
    parallel, counts = kind.startswith("merged"), dict.fromkeys(SIDES, 0)
    for name, value in model.named_parameters():
        if ".layers." not in name or NORM.fullmatch(name) or name.endswith(".residual.weight"):
            continue
        side, index, *_, role, what = name.replace(".layers", "").split(".")
        (method, options), found, layer = methods[side], MATRIX.fullmatch(name), int(index) + 1
        own = kind != "self" and (found is None or ".self_attn.fc" in name or role == "input_proj")
        if what == "weight":
            part = None if own else found.group(3) or "ffn"
            distribution, size = expected(
                method, options, side, layer, part, LIKE[role] if own else role, *value.shape, n, m, one_width)
            if options.get("depth_scaled_kind") == "gpt2" and side == "decoder":
                scaled = not own and role in ("out_proj", "fc2")
                size = 0.02 / math.sqrt(m * (2 if parallel else 3)) if scaled else 0.02
            check_sample(name, value, distribution, size)
            counts[side] += 1
        elif method == "fairseq" and role != "out_proj":
            assert value.abs().min() > 0, name
        else:
            assert value.eq(0).all(), name
    return counts


def check_norms(model):
    norms = {name: value for name, value in model.named_parameters() if NORM.fullmatch(name)}
    for name, value in norms.items():
        assert value.eq(1.0 if name.endswith("weight") else 0.0).all(), name
    return len(norms)


LAYERDROP = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
PLACED = [(POST, "self", 9, 3, 96, method, options) for method, options in CASES]
PLACED += [(POST, "self", 18, 18, DIM, *CASES[4]), (POST, "self", 6, 6, DIM, "ds", LAYERDROP)]
PLACED += [("transformer_prenorm_6l", "self", 6, 6, DIM, name, {}) for name in ("fairseq", "xavier", "lipschitz", "ds")]
PLACED += [("transformer_dlcl_6l", "self", 6, 6, DIM, "depth-scaled", {})]
# merged matrices are separate: Xavier's gamma is sqrt(6 / 2C), not that of a fused matrix
SOME = [CASES[index] for index in (1, 2, 5, -1)]
PLACED += [(POST, kind, 4, 5, DIM, *case) for kind in KINDS if kind != "self" for case in SOME]
PLACED += [(POST, kind, 4, 5, DIM, method, {}) for kind in ("average", "average-ffn", "ssru")
           for method in ("deepnet", "tfixup")]  # fmt: skip


def test_every_method_is_tested():
    assert METHODS == INITS.names()


@pytest.mark.parametrize("name, kind, n, m, width, method, options", PLACED)
def test_every_matrix_has_the_papers_distribution(name, kind, n, m, width, method, options, make):
    """By side, layer (from 1 in each stack), part and role; in stacks of different depth and width."""
    sizes = {"encoder_layers": n, "decoder_layers": m, "decoder_embed_dim": width}
    model = make(name, deep_init=method, **KINDS[kind], **options, **sizes)
    own = OWN[kind.removesuffix("-ffn")] + 2 * ("ffn" in kind)
    counts = check_layers(model, dict.fromkeys(SIDES, (method, options)), n, m, kind)
    assert counts == {"encoder": 6 * n, "decoder": (6 + own) * m}
    norms = check_norms(model)
    assert name != POST or norms == (0 if method in NO_NORMS else 2 * (2 * n + (3 - kind.startswith("merged")) * m))


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


# --- tables ---


def table_size(method, options, side, n, m):
    """Distribution of an embedding of V x C entries, and its size."""
    if method == "lipschitz" and "lipschitz_embeddings" not in options:
        return "uniform", math.sqrt(2 / (DIM + VOCAB))
    factor = {"encoder": 9 * n, "decoder": 9 * m}[side] ** -0.25 if method == "tfixup" else 1.0
    return "normal", factor / math.sqrt(DIM)


SHARED = {"none": {}, "decoder": {"share_decoder_input_output_embed": True}, "all": {"share_all_embeddings": True}}
TABLES = [(method, method, options) for method, options in CASES]
TABLES += [("tfixup", "lipschitz", {}), ("lipschitz", "tfixup", {}), ("fairseq", "tfixup", {})]


@pytest.mark.parametrize("encoder, decoder, options", TABLES, ids=str)
@pytest.mark.parametrize("shared", SHARED)
def test_embeddings_and_output_projection(encoder, decoder, options, shared, make):
    """A table of both stacks has the rule of the encoder."""
    flags = {"encoder_deep_init": encoder, "decoder_deep_init": decoder, **options, **SHARED[shared]}
    model = make(POST, encoder_layers=4, decoder_layers=2, **flags)
    source, target = model.encoder.embed_tokens, model.decoder.embed_tokens
    output, pad = model.decoder.output_projection, source.padding_idx
    words = [row for row in range(VOCAB) if row != pad]
    assert source.weight[pad].eq(0).all() and target.weight[pad].eq(0).all()
    check_sample("encoder", source.weight[words], *table_size(encoder, options, "encoder", 4, 2))
    assert (source.weight is target.weight) is (shared == "all")
    assert (output.weight is target.weight) is (shared != "none")
    if shared != "all":
        check_sample("decoder", target.weight[words], *table_size(decoder, options, "decoder", 4, 2))
    if shared == "none":
        check_sample("output", output.weight, "uniform" if decoder == "lipschitz" else "normal", math.sqrt(1 / DIM))
        assert output.weight[pad].ne(0).any()


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


def test_positions_have_the_rule_of_embeddings(build, make):
    """Learned positions, and the vectors of relative ones, which start as Xavier has it otherwise."""
    model = build(POSTNORM, deep_init="lipschitz", encoder_learned_pos=True, max_source_positions=500)
    table = model.encoder.embed_positions
    check_sample("positions", table.weight[table.padding_idx + 1 :], "uniform", (2 / sum(table.weight.shape)) ** 0.5)
    assert float(table.weight[table.padding_idx].abs().max()) == 0.0
    for init, factor in (("lipschitz", 2), ("fairseq", 6)):
        model = make("transformer_lstm_6l", deep_init=init, relative_positions=60)
        for layer in (*model.encoder.layers, *model.decoder.layers):
            keys = layer.self_attn.relative_keys
            check_sample("relative keys", keys, "uniform", math.sqrt(factor / sum(keys.shape)))


# --- aggregators, and what must not change ---


def same_seed(make, name, seed=3, **flags):
    torch.manual_seed(seed)
    return make(name, encoder_layers=3, decoder_layers=2, **flags)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_else_is_touched_and_the_seed_decides(method, make):
    """Aggregators keep their start, which has no matrices here, and norms theirs."""
    name = POST if method in NO_NORMS else "transformer_dlcl_postnorm_6l"
    first, other, again = (same_seed(make, name, seed, deep_init=method) for seed in (3, 4, 3))
    check_norms(first)
    plain = dict(same_seed(make, name).named_parameters())
    for key, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(key)), key
        if MATRIX.fullmatch(key) and key.endswith("weight") or key.endswith("embed_tokens.weight"):
            assert not torch.equal(value, other.get_parameter(key)), key
        if method == "fairseq" or ".aggregator." in key:
            assert torch.equal(value, plain[key]), key


BETWEEN = {case: row for case, row in {**ALL, **OPTIONS}.items()
           if {"layer_agg", "decoder_memory"} & {*row[1]} and "luna" not in case}  # fmt: skip


@pytest.mark.parametrize("case", BETWEEN)
def test_lipschitz_fills_the_matrices_of_what_connects_layers_and_nothing_else(case, build):
    """Gates of a depth-wise LSTM are one matrix each; a memory keeps its start."""
    name, flags = BETWEEN[case]
    models = []
    for init in ("fairseq", "lipschitz"):
        torch.manual_seed(3)
        models.append(build(name, **flags, deep_init=init))
    for side in SIDES:
        plain, filled = (getattr(model, side).state_dict() for model in models)
        matrices = list(getattr(models[1], side).aggregator.matrices())
        assert all(is_uniform(matrix, matrix.size(1) ** -0.5, 0.85) for matrix in matrices)
        places = {matrix.untyped_storage().data_ptr() for matrix in matrices}
        for key, value in filled.items():
            if key.startswith(("history.", "memory.")) and value.untyped_storage().data_ptr() not in places:
                spread = float(plain[key].float().std(unbiased=False))
                assert float(value.float().std(unbiased=False)) == pytest.approx(spread, rel=0.3), key


def test_gates_of_both_stacks_are_the_encoders(make):
    """If the encoder keeps its start, so do they."""
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
        assert "-layers 1 or more" in str(error) and "\n" not in str(error)
    else:
        assert model(*batch)[0].isfinite().all()


# --- connections ---

N, M = 2, 3
DEPTH = {"encoder_layers": N, "decoder_layers": M}


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_method_adds_and_removes(method, build):
    model, norms = build(POSTNORM, deep_init=method, **DEPTH), 2 * 16 * (2 * N + 3 * M)
    added = {"admin": norms // 2, "rezero": N + M - norms, "tfixup": -norms}.get(method, 0)
    assert size_of(model) - size_of(build(POSTNORM, **DEPTH)) == added
    weights = {name: tuple(value.shape) for name, value in model.named_parameters() if "residual" in name}
    shapes = {"admin": ((2, 16), (3, 16)), "rezero": ((1,), (1,))}.get(method, ())
    layers = [(side, layer, shape) for side, shape in zip(SIDES, shapes) for layer in range(DEPTH[f"{side}_layers"])]
    assert weights == {f"{side}.layers.{layer}.residual.weight": shape for side, layer, shape in layers}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["logn", 1, "1", "n"], ids=repr)
def test_admin_starts_in_closed_form_of_the_number_of_sublayers(kind, how, build):
    """The start may be a number, as in a configuration file."""
    model = build(POSTNORM, deep_init="admin", admin_start=how, **DEPTH, **KINDS[kind])
    for stack, sublayers in ((model.encoder, 2), (model.decoder, 2 if kind.startswith("merged") else 3)):
        connections = sublayers * len(stack.layers)
        value = {"logn": admin_omega(connections), "1": connections**0.5, "n": 1.0}[str(how)]
        for layer in stack.layers:
            assert layer.residual.weight.requires_grad
            torch.testing.assert_close(layer.residual.weight.detach(), torch.full((sublayers, 16), value))


def test_rezero_starts_as_the_identity(build, batch):
    """Over the whole depth: the output is the embedding, and only the gates and the tables move at first."""
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
