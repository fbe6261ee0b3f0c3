"""ResiDual and Attention Residuals, which do all additions between bare sub-layers: equations, limits, whole models."""

import argparse
import itertools

import pytest
import torch
from torch import nn

from fairseq_deep.core.aggregators.attention_residual import AttentionResidual
from fairseq_deep.core.aggregators.residual_dual import ResidualDual
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.aggregators import make_layers
from tests.helpers.flags import parse
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import full_size, size_of, task_of
from tests.helpers.tensors import Kernels, randomise, saved_bytes
from tests.reference.naive_bare import attention_residual, residual_dual

T, B, C, L = 5, 3, 7, 3
N = {"encoder": 2 * L, "decoder": 3 * L}
TINY, POST = "transformer_prenorm_2l2l_tiny", "transformer_postnorm_2l2l_tiny"
DUAL, FULL = {"layer_agg": "residual-dual"}, {"layer_agg": "attention-residual"}
BLOCK = {**FULL, "attention_residual_block": 3}
HYPER = {"layer_agg": "hyper-connections"}
METHODS = [DUAL, FULL, BLOCK, HYPER]
each_method = pytest.mark.parametrize("flags", METHODS, ids=["dual", "full", "block", "hyper"])


def make(kind, layers=L, dim=C, side="encoder", **options):
    return kind(Stack(layers, dim, side=side, layout=kind.layout(side, options)), **options)


def run(aggregator, y_0, sublayers):
    """What counts as y after each sub-layer, and the output."""
    state, path = aggregator.start(y_0), [y_0]
    for index, sublayer in enumerate(sublayers):
        output = sublayer(aggregator.read(state, index))
        state = aggregator.write(state, index, output)
        path.append(aggregator.layer_output(state, output))
    return path, aggregator.finish(state)


def assert_same_with_gradients(aggregator, naive):
    """The outputs of all sub-layers and every gradient of *aggregator* are those of *naive*(y_0, sub-layers)."""
    sublayers = make_layers(aggregator.num_layers, C)
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    sources = [y_0, *aggregator.parameters(), *(p for sublayer in sublayers for p in sublayer.parameters())]
    want, got = naive(y_0, sublayers), torch.stack(run(aggregator, y_0, sublayers)[0])
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(run(aggregator, y_0, sublayers)[0]), want)
    direction = torch.randn_like(want[-1])
    want, got = (torch.autograd.grad(path[-1], sources, direction) for path in (want, got))
    for want_grad, got_grad in zip(want, got):
        assert want_grad.any()
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_residual_dual_equals_the_equations(side):
    aggregator = randomise(make(ResidualDual, side=side).double())
    assert aggregator.num_layers == len(aggregator.norms) == N[side]

    def naive(y_0, sublayers):
        norms = [(norm.weight, norm.bias) for norm in aggregator.norms]
        dual = aggregator.dual_norm.weight, aggregator.dual_norm.bias
        path, output = residual_dual(y_0, sublayers, norms, dual)
        return torch.stack([*path[:-1], output])

    assert_same_with_gradients(aggregator, naive)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("block", [None, 1, 2, 4, 6, 20])
def test_attention_residual_equals_the_equations(side, block):
    """With blocks that divide the number of sub-layers, that leave a rest, and that are longer than the stack."""
    aggregator = randomise(make(AttentionResidual, side=side, **({} if block is None else {"block": block})).double())
    assert aggregator.num_layers == len(aggregator.query) == N[side]

    def naive(y_0, sublayers):
        return torch.stack(attention_residual(y_0, sublayers, aggregator.query, aggregator.gain, block or 1))

    assert_same_with_gradients(aggregator, naive)


@pytest.mark.parametrize(
    "kind, options", [(ResidualDual, {}), (AttentionResidual, {}), (AttentionResidual, {"block": 4})], ids=str
)
def test_the_output_is_what_counts_as_y_of_the_last_layer(kind, options):
    path, output = run(randomise(make(kind, **options).double()), torch.randn(T, B, C).double(), make_layers(2 * L, C))
    assert torch.equal(path[-1], output)


def test_attention_residual_starts_as_the_mean_of_what_it_reads():
    aggregator = make(AttentionResidual)
    outputs = list(torch.randn(2 * L + 1, T, B, C))
    state = aggregator.start(outputs[0])
    assert torch.equal(aggregator.read(state, 0), outputs[0])
    for index, output in enumerate(outputs[1:]):
        state = aggregator.write(state, index, output)
        torch.testing.assert_close(state[0], torch.stack(outputs[: index + 2]).mean(0))
    assert torch.equal(aggregator.finish(state), state[0])


def test_start_values():
    dual, attention = make(ResidualDual), make(AttentionResidual, side="decoder")
    assert attention.query.eq(0).all() and attention.gain.eq(1).all()
    assert {name for name, _ in attention.named_parameters()} == {"query", "gain"}
    for norm in (*dual.norms, dual.dual_norm):
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    assert not dual.matrices() and not attention.matrices()
    assert attention.record()["query"] == 0
    nn.init.constant_(attention.query, 2.0)
    assert attention.record()["query"].item() == pytest.approx(2 * (3 * L * C) ** 0.5)


# --- limits: the plain stacks


def plain_key(key, norms):
    """The name in a plain stack of a parameter of a model with bare sub-layers; *norms*: those of a layer, in order."""
    side, part, *rest = key.split(".")
    names = norms[side]
    if part == "layers":
        return ".".join([side, part, str(int(rest[0]) // len(names)), *rest[1:]])
    if part == "history" and rest[0] == "norms":
        index = int(rest[1])
        return f"{side}.layers.{index // len(names)}.{names[index % len(names)]}.{rest[2]}"
    return None if part == "history" else key


def sublayer_norms(flags):
    attentions = ["encoder_attn_layer_norm"] if "decoder_attn" in flags else []
    attentions = attentions or ["self_attn_layer_norm", "encoder_attn_layer_norm"]
    return {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": [*attentions, "final_layer_norm"],
    }


def copy_into(plain, model, flags):
    """Give *plain*, of the same shape, the weights of *model*; every one must have its place."""
    names = {plain_key(key, sublayer_norms(flags)): key for key, _ in model.named_parameters()}
    names.pop(None)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(own[names.pop(key)])
    assert not names


def without_eps(*models):
    """Norms that scaling their input does not change."""
    for module in itertools.chain(*(model.modules() for model in models)):
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-20


def perturb(model):
    """Away from start values that hide something: norms of gain 1, biases of 0."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not key.endswith((".query", ".gain")):
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("flags", [{}, {"decoder_attn": "merged"}], ids=["self", "merged"])
def test_residual_dual_without_r_is_post_norm(flags, build, batch):
    model, plain = build(POST, **DUAL, **flags).double().eval(), build(POST, **flags).double().eval()
    perturb(model)
    copied = {side: getattr(model, side).aggregator.dual_norm for side in ("encoder", "decoder")}
    for norm in copied.values():
        nn.init.zeros_(norm.weight)
        nn.init.zeros_(norm.bias)
    copy_into(plain, model, flags)
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])
    nn.init.ones_(copied["encoder"].weight)
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], rtol=0.01)


@pytest.mark.parametrize("flags", [{}, {"decoder_attn": "merged"}], ids=["self", "merged"])
@pytest.mark.parametrize("block", [1, 3])
def test_attention_residual_starts_as_pre_norm(flags, block, build, batch):
    """A sum and a mean are the same to the norms that follow."""
    model = build(TINY, **FULL, attention_residual_block=block, **flags).double().eval()
    plain = build(TINY, **flags).double().eval()
    perturb(model)
    copy_into(plain, model, flags)
    without_eps(model, plain)
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])
    nn.init.normal_(model.encoder.aggregator.query)
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], rtol=0.01)


# --- half precision, memory


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def test_r_does_not_overflow_in_fp16():
    aggregator = make(ResidualDual).half()
    aggregator.norms = nn.ModuleList(Zero() for _ in range(2 * L))
    path, output = run(aggregator, torch.randn(T, B, C).half(), [lambda x: x + 6e4 * torch.eye(C)[0].half()] * (2 * L))
    assert output.dtype == torch.float16 and output.isfinite().all()
    peak = (C - 1) ** 0.5  # of LN where one feature towers above the others
    torch.testing.assert_close(output[..., 0], torch.full((T, B), peak).half(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_up_in_fp32(dtype):
    """r, the logits and the sums are as exact as their inputs; the state keeps the type of x."""
    outputs = torch.randn(2 * L + 1, T, B, C).to(dtype)
    dual = make(ResidualDual).to(dtype)
    dual.norms = nn.ModuleList(nn.Identity() for _ in range(2 * L))
    state = dual.start(outputs[0])
    for index, output in enumerate(outputs[1:]):
        state = dual.write(state, index, output)
    assert state[0].dtype == dtype and state[1].dtype == torch.float32
    torch.testing.assert_close(state[1], outputs.float().sum(0))

    attention = randomise(make(AttentionResidual)).to(dtype)
    exact = make(AttentionResidual).double()
    exact.load_state_dict(attention.state_dict())
    for aggregator in (attention, exact):
        state = aggregator.start(outputs[0].to(aggregator.query.dtype))
        for index, output in enumerate(outputs[1:]):
            state = aggregator.write(state, index, output.to(aggregator.query.dtype))
        if aggregator is attention:
            assert {entry.dtype for entry in state[2::2]} == {torch.float32}
            rough = state[0]
    assert rough.dtype == dtype
    torch.testing.assert_close(rough, state[0].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_autocast_does_not_lower_the_logits():
    aggregator, x = randomise(make(AttentionResidual)), torch.randn(T, B, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = nn.functional.linear(x, aggregator.query)
        logits = aggregator.start(x)[2]
    assert lowered.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, aggregator.start(x)[2])


@pytest.mark.parametrize("kind, limit, logits", [(ResidualDual, 1.1, 0.0), (AttentionResidual, 1.1, 0.3)])
def test_memory_grows_with_the_number_of_sublayers_not_its_square(kind, limit, logits):
    """Sums over stacked sources would add as many tensors as there are sources below."""
    width = 128
    size = 64 * B * width * 4  # bytes of a T x B x C tensor

    def total(layers):
        aggregator = make(kind, layers, width)
        y_0 = torch.randn(64, B, width, requires_grad=True)
        sublayers = [lambda x: x * 2.0] * aggregator.num_layers
        return saved_bytes(lambda: run(aggregator, y_0, sublayers), aggregator.parameters())

    growth = [(total(2 * layers) - total(layers)) / (2 * layers) / size for layers in (4, 8)]
    assert growth[0] < limit + logits
    assert growth[1] - growth[0] < 0.01 + logits, "only the logits of a source grow, with the number of its readers"


@pytest.mark.parametrize("trains", [True, False])
def test_kernels_grow_with_the_number_of_sublayers_not_its_square(trains):
    counts = []
    for layers in (2, 4, 8):
        aggregator, y_0 = make(AttentionResidual, layers), torch.randn(T, B, C, requires_grad=True)
        kernels = Kernels()
        with kernels, torch.set_grad_enabled(trains):
            output = run(aggregator, y_0, [lambda x: x * 2.0] * aggregator.num_layers)[1]
            if trains:
                output.sum().backward()
        counts.append(len(kernels.names))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


# --- whole models

MIXED_LSTM = "transformer_lstm_2l2l_tiny"
COMBINATIONS = {
    "dual": (TINY, DUAL),
    "full": (TINY, FULL),
    "block": (TINY, BLOCK),
    "dual-merged": (TINY, {**DUAL, "decoder_attn": "merged"}),
    "block-average": (TINY, {**BLOCK, "decoder_attn": "average"}),
    "dual-full": (TINY, {"encoder_layer_agg": "residual-dual", "decoder_layer_agg": "attention-residual"}),
    "full-dlcl": (TINY, {"encoder_layer_agg": "attention-residual", "decoder_layer_agg": "dlcl"}),
    "lstm-dual": (MIXED_LSTM, {"decoder_layer_agg": "residual-dual", "decoder_ffn_embed_dim": 32}),
    "full-relative": (TINY, {**FULL, "relative_positions": 3}),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("check", sorted(INVARIANCES))
def test_what_holds_for_every_model(check, combination, build, dictionary):
    def make_model(**more):
        name, flags = COMBINATIONS[combination]
        model = build(name, **{**flags, **more})
        for stack in (model.encoder, model.decoder):
            if isinstance(stack.aggregator, AttentionResidual):
                nn.init.normal_(stack.aggregator.query, std=0.5)  # at 0, the gain has no influence
        return model

    INVARIANCES[check](make_model, dictionary)


@each_method
def test_modules_are_bare_sublayers(flags, build):
    model = build(TINY, **flags)
    for stack, count in ((model.encoder, 4), (model.decoder, 6)):
        assert len(stack.layers) == stack.aggregator.num_layers == count
        assert (stack.layer_norm is None) == (flags is DUAL)
        norms = [module for module in stack.layers.modules() if isinstance(module, nn.LayerNorm)]
        assert len(norms) == (0 if flags is DUAL else count)
        assert not any(hasattr(layer, "residual") for layer in stack.layers)


@each_method
def test_states_of_the_stacks_are_the_outputs_of_their_layers(flags, build, batch):
    source, lengths, target = batch
    model = build(TINY, **flags).eval()
    with torch.no_grad():
        encoder_out = model.encoder(source, lengths, return_all_hiddens=True)
        features, extra = model.decoder.extract_features(target, encoder_out=encoder_out)
    assert len(encoder_out["encoder_states"]) == len(extra["inner_states"]) == 3
    for stack, last, output in (
        (model.encoder, encoder_out["encoder_states"][-1], encoder_out["encoder_out"][0]),
        (model.decoder, extra["inner_states"][-1], features.transpose(0, 1)),
    ):
        assert torch.equal(last if stack.layer_norm is None else stack.layer_norm(last), output)


@each_method
def test_a_memory_that_reads_the_last_layer_alone_is_the_plain_model(flags, build, batch):
    model = build(TINY, **flags, decoder_memory="transparent").eval()
    plain = build(TINY, **flags).eval()
    state = model.state_dict()
    plain.load_state_dict({key: value for key, value in state.items() if ".memory." not in key})
    with torch.no_grad():
        assert not torch.allclose(model(*batch)[0], plain(*batch)[0], rtol=0.01)
        model.encoder.memory.weight[:, -1] = 100.0
        torch.testing.assert_close(model(*batch)[0], plain(*batch)[0], rtol=1e-4, atol=1e-5)


@each_method
@pytest.mark.parametrize("init", ["xavier", "lipschitz"])
def test_inits_fill_the_matrices_of_all_sublayers(flags, init, build):
    torch.manual_seed(1)
    model = build(TINY, **flags, deep_init=init)
    for stack, (side, count) in ((model.encoder, ("encoder", 6)), (model.decoder, ("decoder", 10))):
        matrices = {name: p for name, p in stack.layers.named_parameters() if name.endswith("weight") and p.dim() == 2}
        assert len(matrices) == 2 * count, side
        for name, matrix in matrices.items():
            fused = "self_attn" in name and "out_proj" not in name
            bound = (6 / sum(matrix.shape)) ** 0.5 * (0.5**0.5 if fused else 1.0)
            bound = matrix.size(1) ** -0.5 if init == "lipschitz" else bound
            assert 0.9 * bound < matrix.abs().max() <= bound, name
        ends = ("proj.bias", "fc1.bias", "fc2.bias")
        biases = [p for name, p in stack.layers.named_parameters() if name.endswith(ends)]
        assert len(biases) == len(matrices) and not any(bias.any() for bias in biases)


POST_6L, PRE_6L, MERGED_6L = 61_566_976, 61_569_024, 55_259_136  # the plain stacks, at 34,040 entries
COUNTS = [
    ("transformer_postnorm_6l", {}, POST_6L),
    ("transformer_postnorm_6l", DUAL, POST_6L + 2 * 2 * 512),
    ("transformer_prenorm_6l", {}, PRE_6L),
    ("transformer_prenorm_6l", FULL, PRE_6L + 2 * 512 * (12 + 18)),
    ("transformer_prenorm_6l", BLOCK, PRE_6L + 2 * 512 * (12 + 18)),
    ("transformer_prenorm_6l", {"decoder_attn": "merged"}, MERGED_6L),
    ("transformer_prenorm_6l", {**FULL, "decoder_attn": "merged"}, MERGED_6L + 2 * 512 * (12 + 12)),
]


@pytest.mark.parametrize("name, flags, expected", COUNTS)
def test_parameter_counts(name, flags, expected):
    assert size_of(full_size(name, 34040, share_all_embeddings=True, **flags)) == expected


def test_flags_reach_both_stacks(dictionary):
    line = ["--arch", TINY, "--layer-agg", "attention-residual", "--attention-residual-block", "2"]
    args = parse(*line)
    assert args.attention_residual_block == 2
    model = build_architecture(TINY, dictionary, **FULL, attention_residual_block=2)
    assert (model.encoder.aggregator.block, model.decoder.aggregator.block) == (2, 2)
    default = build_architecture(TINY, dictionary, **FULL)
    assert (default.encoder.aggregator.block, default.decoder.aggregator.block) == (1, 1)


@each_method
def test_norm_placement_changes_nothing(flags, build):
    """Their norms are part of the methods."""
    shapes = [{key: p.shape for key, p in build(name, **flags).named_parameters()} for name in (TINY, POST)]
    assert shapes[0] == shapes[1]


def test_flags_that_no_architecture_has_settled_add_no_norm(dictionary):
    """As from fairseq-hydra-train."""
    task = task_of(dictionary)
    sizes = {f"{side}_{name}": 8 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    flags = {**DUAL, **sizes, "encoder_normalize_before": True, "decoder_normalize_before": True}
    model = DeepTransformerModel.build_model(argparse.Namespace(**flags), task)
    assert model.encoder.layer_norm is None and model.decoder.layer_norm is None


BAD = [
    ({**FULL, "attention_residual_block": 0}, "--attention-residual-block 0 must be at least 1"),
    ({"attention_residual_block": 2}, "--attention-residual-block has no effect without --layer-agg"),
    ({**DUAL, "encoder_normalize_before": True}, "--encoder-normalize-before has no effect: --layer-agg residual-dual"),
    ({**FULL, "decoder_normalize_before": False}, "--decoder-normalize-before has no effect: --layer-agg attention-r"),
    ({**DUAL, "no_decoder_final_norm": True}, "--no-decoder-final-norm is not supported with"),
]
FOR_RESIDUALS = ("ds", "deepnet", "admin", "rezero", "tfixup")
for method in (DUAL, FULL, HYPER):
    BAD += [
        ({**method, "encoder_layers": 0}, "use --encoder-layers 1 or more"),
        ({**method, "decoder_layers": 0}, "use --decoder-layers 1 or more"),
        ({**method, "decoder_layerdrop": 0.1}, "omit --decoder-layerdrop"),
        ({**method, "residual": "sdu"}, "--residual sdu requires residual connections"),
        *(({**method, "deep_init": init}, "use xavier or lipschitz") for init in FOR_RESIDUALS),
    ]


@pytest.mark.parametrize("flags, words", BAD)
def test_bad_input_is_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY, **flags)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
