"""--decoder-attn with every --deep-init, and flags that mean nothing for it: start values, equations, refusals."""

import math

import pytest
import torch

from fairseq_deep.core.inits import INITS
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from tests.helpers.decoder_attention import (
    KINDS,
    PAD,
    assert_same_gradients,
    attention_functions,
    naive_scores,
    norms_of,
)
from tests.helpers.equations import start
from tests.helpers.flags import one_line, parse
from tests.helpers.inits import DIM, FFN, FITTING, MATRIX, STACKS, VOCAB, check_sample, expected
from tests.helpers.models import make_batch, make_dictionary
from tests.helpers.tensors import shake
from tests.reference import naive_average as averages
from tests.reference import naive_connections as naive

POST, PRE, LSTM = "transformer_postnorm_6l", "transformer_prenorm_6l", "transformer_lstm_6l"
MERGED = ["merged", "merged-self", "merged-average"]
THREE = {"deepnet", "tfixup"}  # constants for three sub-layers
N, M = 4, 5


@pytest.fixture(scope="module")
def wide():
    """wide(kind, method, **flags): a post-norm model, wide enough for the statistics of its matrices."""
    words = make_dictionary(VOCAB)
    sizes = {"encoder_embed_dim": DIM, "encoder_ffn_embed_dim": FFN, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_layers": N, "decoder_layers": M}  # fmt: skip

    def build(kind, method, **flags):
        return build_architecture(POST, words, **{**sizes, **KINDS[kind], "deep_init": method, **flags})

    return build


def average_size(method, options, layer, role, fan_out, fan_in):
    """Distribution and size of the matrices of an average attention or SSRU, which no paper has as fused ones."""
    gamma, scaled = math.sqrt(6 / (fan_in + fan_out)), role in ("fc1", "fc2", "input_proj")
    if method == "lipschitz":
        return "uniform", math.sqrt(1 / fan_in)
    if method == "ds":
        return "uniform", gamma * layer ** -options.get("ds_init_exponent", 0.25)
    if method == "depth-scaled":
        return ("normal", 0.02) if options else ("uniform", gamma / math.sqrt(layer))
    if method == "deepnet":
        return "normal", math.sqrt(2 / (fan_in + fan_out)) * (naive.deepnet_beta("decoder", N, M) if scaled else 1)
    return "uniform", gamma * (naive.tfixup_factor("decoder", N, M) if method == "tfixup" and scaled else 1)


CASES = [("xavier", {}), ("lipschitz", {}), ("ds", {}), ("ds", {"ds_init_exponent": 0.5}), ("depth-scaled", {}),
         ("depth-scaled", {"depth_scaled_kind": "gpt2"}), ("admin", {}), ("rezero", {})]  # fmt: skip


@pytest.mark.parametrize(
    "kind, method, options",
    [(kind, *case) for kind in KINDS if kind != "self" for case in CASES]
    + [(kind, method, {}) for kind in ("average", "average-ffn", "ssru") for method in sorted(THREE)],
)
def test_every_matrix_of_the_decoder_has_its_start(kind, method, options, wide):
    """Those of merged attention are separate: Xavier's gamma is sqrt(6 / 2C), not that of a fused matrix."""
    model, seen = wide(kind, method, **options), set()
    for name, value in model.decoder.layers.named_parameters(prefix="decoder.layers"):
        found = MATRIX.fullmatch(name)
        if value.dim() == 1 and ".residual." not in name:
            assert value.eq(1.0 if "norm" in name and name.endswith("weight") else 0.0).all(), name
        elif "gate" in name or "self_attn.fc" in name or "input_proj" in name:
            _, _, layer, _, role, _ = name.split(".")
            size = average_size(method, options, int(layer) + 1, role, *value.shape)
            check_sample(name, value, *size)
            seen.add((int(layer) + 1, role))
        elif found:
            _, index, part, role, _ = found.groups()
            place = ("decoder", int(index) + 1, part, role)
            distribution, size = expected(method, options, *place, *value.shape, N, M, True)
            if options.get("depth_scaled_kind") == "gpt2" and role in ("out_proj", "fc2"):
                size = 0.02 / math.sqrt(M * (2 if kind.startswith("merged") else 3))
            check_sample(name, value, distribution, size)
            seen.add(place[1:])
    attention = {"q_proj", "k_proj", "v_proj", "out_proj"}
    places = {("encoder_attn", role) for role in attention} | {(None, "fc1"), (None, "fc2")}
    places |= {("self_attn", role) for role in attention} if kind == "merged-self" else set()
    places |= {("gate",)} if "average" in kind or kind == "ssru" else set()
    places |= {("input_proj",)} if kind == "ssru" else set()
    places |= {("fc1",), ("fc2",)} if "ffn" in kind else set()
    assert seen == {(layer, *place) for layer in range(1, M + 1) for place in places}


@pytest.mark.parametrize("start, value", [("logn", naive.admin_omega(2 * M)), ("1", math.sqrt(2 * M)), ("n", 1.0)])
@pytest.mark.parametrize("kind", MERGED)
def test_admin_counts_two_sublayers(kind, start, value, wide):
    for layer in wide(kind, "admin", admin_start=start).decoder.layers:
        assert layer.residual.weight.shape == (2, DIM)
        torch.testing.assert_close(layer.residual.weight.detach(), torch.full((2, DIM), value))
    for layer in wide("average", "admin", admin_start=start).decoder.layers:
        assert layer.residual.weight.shape == (3, DIM)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "self"])
def test_admin_profile_follows_the_recursion(kind, build, dictionary):
    flags = {**KINDS[kind], "deep_init": "admin", "admin_start": "profile", "encoder_layers": 2, "decoder_layers": 3}
    model = build(POST, **flags)
    source, lengths, target = make_batch(dictionary, lengths=(5, 5, 5), target_lengths=(6, 6, 6))
    memory = []
    model.encoder.register_forward_hook(lambda _, args, output: memory.append(output["encoder_out"][0]))
    with torch.no_grad():
        model.train()(source, lengths, target)
        context = (memory[0], lambda b, i, j: True, lambda b, i, j: j <= i, averages.average_mask(target.ne(PAD)))
        pairs = []
        for layer in model.decoder.layers:
            pairs += zip(attention_functions(layer, kind, *context), norms_of(layer, kind))
            weights = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
            norm = layer.final_layer_norm
            pairs.append((naive.feed_forward_function(*weights), (norm.weight, norm.bias)))
        omegas = naive.profile(start(model.decoder, target), pairs)
    actual = torch.cat([layer.residual.weight.detach() for layer in model.decoder.layers])
    assert len(actual) == len(omegas) == 3 * (2 if kind.startswith("merged") else 3)
    torch.testing.assert_close(actual, torch.tensor(omegas)[:, None].expand_as(actual), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "self"])
@pytest.mark.parametrize("method", ["admin", "rezero"])
def test_scores_and_gradients_with_connections_of_their_own(kind, method, build, batch):
    model = build("transformer_postnorm_2l2l_tiny", deep_init=method, decoder_layers=3, **KINDS[kind]).double()
    shake(model, 0.5 if method == "admin" else 0.2)
    model.decoder.need_attn, words = False, batch[2].ne(PAD)
    wanted = naive_scores(model, kind, "postnorm", *batch, method=method)[words]
    actual = model(*batch)[0][words]
    torch.testing.assert_close(actual, wanted)
    assert_same_gradients(model, wanted, actual)


@pytest.mark.parametrize("method", INITS.names())
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "self"])
def test_every_combination_is_built_or_refused(kind, name, method, build):
    flags = {key: value for key, value in STACKS[name].items() if key != "relative_positions"}
    counts_three = method in THREE and kind.startswith("merged")
    no_width = "ffn" in kind and ("lstm" in name or "rnn" in name)
    if name in FITTING[method] and not counts_three and not no_width:
        build(name, deep_init=method, **flags, **KINDS[kind])
        return
    with pytest.raises(UsageError) as error:
        build(name, deep_init=method, **flags, **KINDS[kind])
    text = one_line(error)
    assert "use " in text or "omit " in text
    assert f"--deep-init {method}" in text or (no_width and "--average-ffn" in text)


def clashes(kinds, name, **flags):
    """The refusal of each of *flags* by each of *kinds*."""
    for kind in kinds:
        for flag, value in flags.items():
            problem = f"--{flag.replace('_', '-')} is not supported with --decoder-attn {kind}"
            yield name, {**KINDS[kind], flag: value}, problem, "omit one of them"


@pytest.mark.parametrize(
    "name, flags, problem, cure",
    [
        (POST, {"decoder_attn": "mergd"}, "unknown --decoder-attn mergd (did you mean merged?)", "choose from average"),
        *(
            (POST, {**flags, "average_ffn": True}, "--average-ffn has no effect", "omit it")
            for flags in ({}, *(KINDS[kind] for kind in ("merged", "merged-self")))
        ),
        *clashes(MERGED, POST, no_cross_attention=True),
        *clashes(MERGED, LSTM, lstm_merge="concat", lstm_attn_residual=True),
        *clashes(MERGED, LSTM, lstm_merge="two"),
        *clashes(["average", "merged", "merged-average", "ssru"], LSTM, relative_positions=2),
        (POST, {"decoder_attn": "merged", "decoder_embed_dim": 8}, "one matrix for the values", "use merged-average"),
        *(
            (name, KINDS[kind], "--average-ffn requires a feed-forward width", "omit it")
            for kind in ("average-ffn", "merged-average-ffn")
            for name in (LSTM, "transformer_rnn_6l")
        ),
        *(
            (POST, {**KINDS[kind], "deep_init": method}, f"--deep-init {method} requires three sub-layers", "use ds or")
            for kind in MERGED
            for method in sorted(THREE)
        ),
        ("transformer_ds_matt_12l12l", {"deep_init": "deepnet"}, "--decoder-attn merged has two", "use ds or"),
        (POST, {"decoder_attn": "merged", "decoder_deep_init": "tfixup"}, "--decoder-attn merged has two", "use ds or"),
    ],
)
def test_flags_that_clash(name, flags, problem, cure, build):
    with pytest.raises(UsageError) as error:
        build(name, **flags)
    assert problem in one_line(error)
    assert cure in one_line(error)


@pytest.mark.parametrize(
    "name, flags",
    [
        (POST, {"decoder_attn": "average", "no_cross_attention": True}),
        (POST, {"decoder_attn": "merged-average", "decoder_embed_dim": 8}),
        (POST, {"decoder_attn": "merged-self", "decoder_embed_dim": 8}),
        (POST, {"decoder_attn": "merged", "deep_init": "xavier", "encoder_deep_init": "deepnet"}),
        (POST, {"decoder_attn": "merged", "decoder_layerdrop": 0.2}),
        (POST, {"decoder_attn": "average", "average_ffn": True, "deep_init": "deepnet"}),
        (LSTM, {"decoder_attn": "merged-self", "relative_positions": 2}),
        (LSTM, {"decoder_attn": "average", "lstm_merge": "two", "lstm_share": "none"}),
        (POST, {"decoder_attn": "ssru", "no_cross_attention": True, "deep_init": "lipschitz"}),
        (LSTM, {"decoder_attn": "merged", "decoder_layer_agg": "residual", "encoder_layer_agg": "lstm"}),
        ("transformer_dlcl_6l", {"decoder_attn": "merged", "decoder_layer_agg": "lstm"}),
        ("transformer_ds_matt_12l12l", {"layer_agg": "dlcl"}),
        ("transformer_matt_6l", {"layer_agg": "dlcl", "deep_init": "ds", "dlcl_window": 3}),
    ],
    ids=str,
)
def test_what_goes_together_trains(name, flags, build, batch):
    if "decoder_layer_agg" in flags:  # the narrow width of the fixture is for the architecture's own aggregator
        flags = {**flags, "decoder_ffn_embed_dim": 32 if flags["decoder_layer_agg"] == "residual" else None}
    model = build(name, **flags).train()
    output = model(*batch)[0]
    assert output.isfinite().all()
    output.square().mean().backward()
    used = [parameter.grad is not None for parameter in model.decoder.layers.parameters()]
    assert any(used) and (all(used) or "decoder_layerdrop" in flags)


def test_the_command_line_names_the_nearest():
    with pytest.raises(UsageError) as error:
        parse("--arch", POST, "--decoder-attn", "merge")
    assert "did you mean merged?" in one_line(error)
