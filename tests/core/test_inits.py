"""Initial weights (--deep-init): every matrix against the papers' closed forms; connections; untouched parameters.

Those of all other methods are in ``tests/snapshots/initial.txt``, the equations in ``test_whole_models.py``.
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
from tests.helpers.decoder_attention import KINDS, LUNA
from tests.helpers.inits import CASES, MATRIX, METHODS, expected, initial_values
from tests.helpers.methods import METHODS as ALL
from tests.helpers.methods import OPTIONS
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import VOCAB
from tests.reference.naive_connections import admin_omega

SIDES = ("encoder", "decoder")
C = 16
NORM = re.compile(r"(encoder|decoder)\.(?:layers\.\d+\.|memory\.layers\.\d+\.)?\w*layer_?norm\w*\.(weight|bias)")
NO_NORMS = ("tfixup", "rezero")
# matrices of a layer, without those of the attention to the source and of the feed-forward network
OWN = {"self": 4, "average": 1, "ssru": 2, "merged": 0, "merged-self": 4, "merged-average": 1, "luna": 9}
# have the rule of these, in no fused matrix
LIKE = {"gate": "q_proj", "input_proj": "v_proj", "fc1": "fc1", "fc2": "fc2"}
ALIASES = (("encoder.memory.layers", "decoder.layers"), (".layer_norm", ".encoder_norm"), ("pq_proj", "q_proj"),
           ("pc_proj", "k_proj"))  # fmt: skip
CHOICES = {**KINDS, "luna": LUNA}


@pytest.fixture
def make(build):
    """make(arch, **flags): a narrow model, and the initial values of its parameters by name."""
    return lambda arch, **flags: initial_values(lambda: build(arch, **flags))


# --- matrices of layers ---


def check_layers(model, values, methods, n, m, kind="self"):
    """All parameters of the layers are what the *methods* {side: (name, options)} say; the numbers of matrices."""
    one_width = model.encoder.embed_tokens.embedding_dim == model.decoder.embed_tokens.embedding_dim
    parallel, counts = kind.startswith("merged"), dict.fromkeys(SIDES, 0)
    for full, value in model.named_parameters():
        name = full.replace(".self_attn.pack.", ".self_attn.").replace(".pack.", ".encoder_attn.")  # Luna's
        for alias, usual in ALIASES:
            name = name.replace(alias, usual)
        if ".layers." not in name or NORM.fullmatch(full) or name.endswith(".residual.weight"):
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
            assert values[full] == (distribution, pytest.approx(size)), full
            counts[side] += 1
        elif method == "fairseq" and role != "out_proj":
            assert values[full][0] == "uniform", full
        else:
            assert values[full] == (0.0,), full
    return counts


def check_norms(values):
    norms = {name: value for name, value in values.items() if NORM.fullmatch(name)}
    for name, value in norms.items():
        assert value == (float(name.endswith("weight")),), name
    return len(norms)


LAYERDROP = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
PLACED = [(POST, "self", 9, 3, 24, method, options) for method, options in CASES]
PLACED += [(POST, "self", 18, 18, C, *CASES[4]), (POST, "self", 6, 6, C, "ds", LAYERDROP)]
PLACED += [("transformer_prenorm_6l", "self", 6, 6, C, name, {}) for name in ("fairseq", "xavier", "lipschitz", "ds")]
PLACED += [("transformer_dlcl_6l", "self", 6, 6, C, "depth-scaled", {})]
PLACED += [(f"transformer_{name}_6l", "self", 6, 6, C, init, {}) for init in ("xavier", "lipschitz")
           for name in ("residual_dual", "attention_residual", "hyper_connections")]  # fmt: skip
# merged matrices are separate: Xavier's gamma is sqrt(6 / 2C), not that of a fused matrix
SOME = [CASES[index] for index in (1, 2, 5, -1)]
PLACED += [(POST, kind, 4, 5, C, *case) for kind in KINDS if kind != "self" for case in SOME]
PLACED += [(POST, kind, 4, 5, C, method, {}) for kind in ("average", "average-ffn", "ssru")
           for method in ("deepnet", "tfixup")]  # fmt: skip
PLACED += [(POST, "luna", 4, 5, C, method, {}) for method in ("fairseq", "xavier", "ds", "lipschitz")]


def test_every_method_is_tested():
    assert METHODS == INITS.names()


@pytest.mark.parametrize("name, kind, n, m, width, method, options", PLACED)
def test_every_matrix_has_the_papers_distribution(name, kind, n, m, width, method, options, make):
    """By side, layer (from 1 in each stack), part and role; in stacks of different depth and width."""
    sizes = {"encoder_layers": n, "decoder_layers": m, "decoder_embed_dim": width}
    model, values = make(name, deep_init=method, **CHOICES[kind], **options, **sizes)
    own = OWN[kind.removesuffix("-ffn")] + 2 * ("ffn" in kind)
    counts = check_layers(model, values, dict.fromkeys(SIDES, (method, options)), n, m, kind)
    assert counts == {"encoder": (6 + 3 * (kind == "luna")) * n, "decoder": (6 + own) * m}
    norms = check_norms(values)
    if name == POST and kind != "luna":
        assert norms == (0 if method in NO_NORMS else 2 * (2 * n + (3 - kind.startswith("merged")) * m))


@pytest.mark.parametrize("side, other", [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("method", METHODS)
def test_each_stack_can_have_its_own_method(method, side, other, make):
    rest = "lipschitz" if method == "fairseq" else "fairseq"
    flags = {"encoder_layers": 4, "decoder_layers": 5, "deep_init": rest, f"{side}_deep_init": method}
    model, values = make(POST, **flags)
    check_layers(model, values, {side: (method, {}), other: (rest, {})}, 4, 5)
    assert check_norms(values) == 16 + 30 - (method in NO_NORMS) * (16 if side == "encoder" else 30)


def stack(side, n, m):
    """One of the stacks of a model with n encoder and m decoder layers."""
    layers, other = (n, m) if side == "encoder" else (m, n)
    return Stack(layers, C, pre_norm=False, side=side, other_layers=other)


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


def table(method, options, side, n, m):
    """Distribution of an embedding of V x C entries, and its size."""
    if method == "lipschitz" and "lipschitz_embeddings" not in options:
        return "uniform", pytest.approx(math.sqrt(2 / (C + VOCAB)))
    factor = {"encoder": 9 * n, "decoder": 9 * m}[side] ** -0.25 if method == "tfixup" else 1.0
    return "normal", pytest.approx(factor / math.sqrt(C))


SHARED = {"none": {}, "decoder": {"share_decoder_input_output_embed": True}, "all": {"share_all_embeddings": True}}
TABLES = [(method, method, options) for method, options in CASES]
TABLES += [("tfixup", "lipschitz", {}), ("lipschitz", "tfixup", {}), ("fairseq", "tfixup", {})]


@pytest.mark.parametrize("encoder, decoder, options", TABLES, ids=str)
@pytest.mark.parametrize("shared", SHARED)
def test_embeddings_and_output_projection(encoder, decoder, options, shared, make):
    """A table of both stacks has the rule of the encoder."""
    flags = {"encoder_deep_init": encoder, "decoder_deep_init": decoder, **options, **SHARED[shared]}
    model, values = make(POST, encoder_layers=4, decoder_layers=2, **flags)
    source, target, output = model.encoder.embed_tokens, model.decoder.embed_tokens, model.decoder.output_projection
    assert source.weight[source.padding_idx].eq(0).all() and target.weight[source.padding_idx].eq(0).all()
    assert values["encoder.embed_tokens.weight"] == table(encoder, options, "encoder", 4, 2)
    assert (source.weight is target.weight) is (shared == "all")
    assert (output.weight is target.weight) is (shared != "none")
    if shared != "all":
        assert values["decoder.embed_tokens.weight"] == table(decoder, options, "decoder", 4, 2)
    if shared == "none":
        wanted = "uniform" if decoder == "lipschitz" else "normal"
        assert values["decoder.output_projection.weight"] == (wanted, pytest.approx(math.sqrt(1 / C)))
        assert output.weight[source.padding_idx].ne(0).any()


@pytest.mark.parametrize("sides", [("encoder",), SIDES], ids="+".join)
def test_pretrained_embeddings_stay(sides, build, dictionary, tmp_path):
    path = tmp_path / "vectors.txt"
    lines = [f"{word} " + " ".join(["7.0"] * 16) for word in dictionary.symbols]
    path.write_text(f"{len(lines)} 16\n" + "\n".join(lines) + "\n")
    model = build(POST, deep_init="lipschitz", **{f"{side}_embed_path": str(path) for side in sides})
    for side in SIDES:
        weight = getattr(model, side).embed_tokens.weight
        assert bool((weight[dictionary.nspecial :] == 7.0).all()) == (side in sides)
        assert float(getattr(model, side).layers[0].fc1.bias.abs().max()) == 0.0


def test_positions_have_the_rule_of_embeddings(make):
    """Learned positions, and the vectors of relative ones, which start as Xavier has it otherwise."""
    model, values = make(POST, deep_init="lipschitz", encoder_learned_pos=True, max_source_positions=50)
    positions = model.encoder.embed_positions
    found = values["encoder.embed_positions.weight"]
    assert found == ("uniform", pytest.approx((2 / sum(positions.weight.shape)) ** 0.5))
    assert not positions.weight[positions.padding_idx].any()
    for init, factor in (("lipschitz", 2), ("fairseq", 6)):
        model, values = make("transformer_lstm_6l", deep_init=init, relative_positions=6)
        for name, keys in model.named_parameters():
            if name.endswith("relative_keys"):
                assert values[name] == ("uniform", pytest.approx(math.sqrt(factor / sum(keys.shape))))


# --- aggregators, and what must not change ---


@pytest.mark.parametrize("method", METHODS)
def test_nothing_else_is_touched_and_the_seed_decides(method, make):
    """Aggregators keep their start, which has no matrices here, and norms theirs."""
    name, made = POST if method in NO_NORMS else "transformer_dlcl_postnorm_6l", []
    for seed, init in ((3, method), (4, method), (3, method), (3, None)):
        torch.manual_seed(seed)
        made.append(make(name, encoder_layers=3, decoder_layers=2, **({"deep_init": init} if init else {})))
    (first, values), (other, _), (again, _), (plain, usual) = made
    check_norms(values)
    for key, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(key)), key
        if MATRIX.fullmatch(key) and key.endswith("weight") or key.endswith("embed_tokens.weight"):
            assert not torch.equal(value, other.get_parameter(key)), key
        if ".aggregator." in key:
            assert values[key] == usual[key], key
        assert method != "fairseq" or torch.equal(value, plain.get_parameter(key)), key


BETWEEN = {case: row for case, row in {**ALL, **OPTIONS}.items()
           if {"layer_agg", "decoder_memory"} & {*row[1]} and "luna" not in case}  # fmt: skip


@pytest.mark.parametrize("case", BETWEEN)
def test_lipschitz_fills_the_matrices_of_what_connects_layers_and_nothing_else(case, make):
    """Gates of a depth-wise LSTM are one matrix each; a memory keeps its start."""
    name, flags = BETWEEN[case]
    (_, plain), (model, filled) = (make(name, **flags, deep_init=init) for init in ("fairseq", "lipschitz"))
    for stack in (model.encoder, model.decoder):
        bounds = {matrix.untyped_storage().data_ptr(): matrix.size(1) ** -0.5 for matrix in stack.aggregator.matrices()}
        for key, value in stack.named_parameters():
            full = f"{stack.stack.side}.{key}"
            if key.startswith(("aggregator.", "memory.")) and full in filled:
                bound = bounds.get(value.untyped_storage().data_ptr())
                assert filled[full] == (plain[full] if bound is None else ("uniform", pytest.approx(bound))), full


def test_gates_of_both_stacks_are_the_encoders(make):
    """If the encoder keeps its start, so do they."""
    plain, of_decoder, of_encoder = (
        make("transformer_lstm_6l", lstm_share="gate-encdec", **flags)[1]["encoder.aggregator.gates.0.weight"]
        for flags in ({}, {"decoder_deep_init": "lipschitz"}, {"encoder_deep_init": "lipschitz"})
    )
    assert of_decoder == plain and of_encoder == ("uniform", pytest.approx(math.sqrt(1 / (2 * C))))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("flags", [{"encoder_ffn_embed_dim": 0}, {"encoder_layers": 0}, {"decoder_layers": 0}], ids=str)
def test_what_is_empty_is_built_or_refused(method, flags, build, batch):
    """fairseq builds it; some constants have a depth or a width in the denominator."""
    try:
        model = build(POST, deep_init=method, **flags)
    except UsageError as error:
        assert "-layers 1 or more" in str(error) and "\n" not in str(error)
    else:
        assert model(*batch)[0].isfinite().all()


# --- connections ---

N, M = 2, 3
DEPTH = {"encoder_layers": N, "decoder_layers": M}


@pytest.mark.parametrize("kind, sublayers", [("self", 3), ("merged", 2), ("merged-average", 2)])
@pytest.mark.parametrize("how", ["logn", 1, "1", "n"], ids=repr)
def test_admin_starts_in_closed_form_of_the_number_of_sublayers(kind, sublayers, how, make):
    """The start may be a number, as in a configuration file."""
    values = make(POST, deep_init="admin", admin_start=how, **DEPTH, **KINDS[kind])[1]
    for name, connections in (("encoder", 2 * N), ("decoder", sublayers * M)):
        value = {"logn": admin_omega(connections), "1": connections**0.5, "n": 1.0}[str(how)]
        assert values[f"{name}.layers.1.residual.weight"] == (pytest.approx(value),)
