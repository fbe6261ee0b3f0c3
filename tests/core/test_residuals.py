"""Residual connections (--residual) against their equations, alone and in layers; their start, and what they keep."""

import io

import pytest
import torch

from fairseq_deep.core.layers import DecoderContext, DecoderLayer, EncoderLayer
from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.residuals.branchnorm import BranchNorm
from fairseq_deep.core.residuals.completep import CompleteP
from fairseq_deep.core.residuals.layernorm_scaling import LayerNormScaling
from fairseq_deep.core.residuals.layerscale import LayerScale
from fairseq_deep.core.residuals.mix_ln import MixLN
from fairseq_deep.core.residuals.prores import ProRes
from fairseq_deep.core.stack import Stack
from tests.helpers.equations import layer_functions
from tests.helpers.models import TINY
from tests.helpers.residuals import FORMS, B, C, S, T, describe, every_placed_form, make, scores
from tests.helpers.tensors import DOUBLE, shake
from tests.reference import naive_residuals as naive

SUBLAYERS = {"encoder": 2, "decoder": 3}

every_form = pytest.mark.parametrize("form", FORMS)


def equation(form, residual, sublayer):
    """The plain form of one sub-layer's connection, with the weights of *residual*."""
    name, options, _ = FORMS[form]
    if name in ("sdu", "highway"):
        (w_1, w_2), (b_1, b_2) = (part.chunk(2) for part in residual.linears[sublayer].parameters())
        if name == "sdu":
            return naive.sdu(w_1, b_1, w_2, b_2, naive.tanh if options else naive.sigmoid)
        return (naive.gated_attention if options else naive.highway_gate)(w_1, b_1, w_2, b_2)
    if name == "b2t":
        return naive.bottom_to_top(sublayer == residual.sublayers - 1)
    if name == "peri":
        norm = residual.layer_norms[sublayer]
        return naive.peri(norm.weight, norm.bias)
    if name == "layerscale":
        return naive.layerscale(residual.weight[sublayer])
    if name == "completep":
        return naive.completep(2, 0.6)
    if name in ("layernorm-scaling", "mix-ln"):
        return naive.plain
    if name == "prores":
        return naive.prores(4, 5, 2, factor=1 / 2 if options.get("around") == "completep" else 1)
    return naive.branchnorm(4, 10)


def assert_same_gradients(expected, actual, sources):
    """Of both tensors, in one random direction, with respect to all *sources* (name, tensor)."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)  # BranchNorm's number is of fp32
    direction = torch.randn_like(actual)
    tensors = [tensor for _, tensor in sources]
    wanted, got = (torch.autograd.grad(y, tensors, direction, allow_unused=True) for y in (expected, actual))
    for (key, tensor), want, have in zip(sources, wanted, got):
        want, have = (torch.zeros_like(tensor) if grad is None else grad for grad in (want, have))
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


@every_form
@pytest.mark.parametrize("side", SUBLAYERS)
def test_every_sublayers_connection_equals_the_equation(form, side):
    residual = shake(make(form, side)).double()
    for sublayer in range(SUBLAYERS[side]):
        x, output, bottom = (torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(3))
        expected = naive.each_position(equation(form, residual, sublayer), x, output, bottom)
        sources = [("x", x), ("F", output), ("bottom", bottom), *residual.named_parameters()]
        assert_same_gradients(expected, residual(x, output, sublayer, bottom), sources)


@every_placed_form
@pytest.mark.parametrize("side", SUBLAYERS)
def test_layers_equal_the_equations(form, norm, side):
    """What a layer gives its connections: its own input as bottom, the sub-layer's raw input, the right index."""
    residual = make(form, side, norm)
    layer = shake((EncoderLayer if side == "encoder" else DecoderLayer)(describe(side, norm), residual)).double()
    x, memory = torch.randn(T, B, C, requires_grad=True, **DOUBLE), torch.randn(S, B, C, requires_grad=True, **DOUBLE)
    functions = layer_functions(layer, memory)
    if "layernorm-scaling" in form:
        functions = [naive.reads_scaled(function, 2) for function in functions]
    actual = layer(x, None) if side == "encoder" else layer(x, DecoderContext(memory))[0]
    names = ["self_attn_layer_norm", *(["encoder_attn_layer_norm"] if side == "decoder" else []), "final_layer_norm"]
    sublayers = [
        (function, equation(form, residual, index), (getattr(layer, name).weight, getattr(layer, name).bias))
        for index, (function, name) in enumerate(zip(functions, names))
    ]
    assert len(sublayers) == SUBLAYERS[side]
    expected = naive.run_layer(x, sublayers, norm == "pre" and form != "mix-ln 2")  # make() has the second layer
    assert_same_gradients(expected, actual, [("x", x), ("memory", memory), *layer.named_parameters()])


def test_b2t_without_the_layers_input_is_post_norm():
    """The only difference is the input of the layer, in the last sub-layer."""
    for side, count in SUBLAYERS.items():
        residual, (x, output, bottom) = make("b2t", side), torch.randn(3, T, B, C, **DOUBLE)
        for sublayer in range(count):
            expected = x + output + (bottom if sublayer == count - 1 else 0)
            torch.testing.assert_close(residual(x, output, sublayer, bottom), expected)
            assert torch.equal(residual(x, output, sublayer, bottom * 0), x + output)


def test_peri_forgets_the_size_of_a_branch():
    residual, (x, output) = make("peri").double(), 9 * torch.randn(2, T, B, C, **DOUBLE)
    torch.testing.assert_close(residual(x, 1000 * output, 0, x), residual(x, output, 0, x), rtol=1e-5, atol=1e-5)
    added = residual(x, output, 1, x) - x
    torch.testing.assert_close(added.var(-1, unbiased=False), torch.ones(T, B, **DOUBLE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["sdu", "highway"])
def test_gates_start_as_linear_layers_do(form):
    torch.manual_seed(1)
    stack = Stack(layers=1, dim=256, side="decoder")
    for linear in RESIDUALS.get(form)(stack, 1).linears:
        for parameter in linear.parameters():
            assert 0.98 / 16 < parameter.detach().abs().max() <= 1 / 16
            assert parameter.detach().mean().abs() < 0.01


@pytest.mark.parametrize("depth, start", [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (60, 1e-6)])
def test_layerscale_starts_by_the_depth_of_its_stack(depth, start):
    for stack in (Stack(layers=depth, dim=C, other_layers=6), Stack(layers=depth, dim=C, side="decoder")):
        weight = LayerScale(stack, 1).weight
        assert naive.layerscale_start(depth) == start
        assert weight.shape == (SUBLAYERS[stack.side], C) and weight.eq(torch.tensor(start)).all()
        assert LayerScale(stack, 1, start=0.5).weight.eq(0.5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layerscale_keeps_its_factors_in_fp32(dtype):
    """1e-6 is a subnormal number of fp16; the sum is rounded once."""
    residual = LayerScale(describe(layers=30), 1)
    with torch.no_grad():
        residual.weight.mul_(1 + torch.rand_like(residual.weight))
    exact = residual.weight.detach().clone()
    residual.weight.grad = torch.ones_like(exact)
    residual.to(dtype)
    assert residual.weight.dtype == residual.weight.grad.dtype == torch.float32
    assert torch.equal(residual.weight, exact)
    x, output = torch.zeros(T, B, C, dtype=dtype), 1000 * torch.randn(T, B, C).to(dtype)
    r = residual(x, output, 1, x)
    assert r.dtype == dtype
    torch.testing.assert_close(r, (exact[1] * output.float()).to(dtype), rtol=0, atol=0)


class TestBranchNorm:
    """a_t = min(1, t / T), in the update t from 1."""

    def value(self, model):
        """a_t of a model, or of connections; the same in all layers."""
        values = {float(module.scale) for module in model.modules() if isinstance(module, BranchNorm)}
        assert len(values) == 1
        return values.pop()

    def test_it_grows_update_by_update_and_stays(self):
        residual = BranchNorm(describe(norm="post"), 1, updates=8)
        assert self.value(residual) == 1 / 8
        for done in range(20):
            for _ in range(2):  # fairseq tells it for each batch of an update
                residual.set_num_updates(done)
            assert self.value(residual) == min(1.0, (done + 1) / 8)
        assert self.value(BranchNorm(describe(norm="post"), 1)) == pytest.approx(1 / 4000)

    def test_fairseq_tells_all_layers(self, build):
        model = build(TINY["post"], residual="branchnorm", branchnorm_updates=8, checkpoint_activations=True)
        model.set_num_updates(5)
        assert self.value(model) == 0.75
        assert len([module for module in model.modules() if isinstance(module, BranchNorm)]) == 4

    def test_a_checkpoint_keeps_it(self, build, batch):
        """For generation, and for training that goes on; fairseq tells the number of updates before it loads."""
        make = lambda: build(TINY["post"], residual="branchnorm", branchnorm_updates=8)  # noqa: E731
        first, resumed, generating, finetuned = make(), make(), make(), make()
        first.set_num_updates(4)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        for model, loaded_at in ((resumed, 5), (generating, None), (finetuned, None)):
            if loaded_at is not None:
                model.set_num_updates(loaded_at)
            file.seek(0)
            model.load_state_dict(torch.load(file))
            assert self.value(model) == 5 / 8
            torch.testing.assert_close(scores(model.eval(), batch), scores(first.eval(), batch))
        resumed.set_num_updates(5)
        assert self.value(resumed) == 6 / 8
        finetuned.set_num_updates(0)
        assert self.value(finetuned) == 5 / 8, "what was trained with open branches keeps them"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_does_not_round_it(self, dtype):
        residual = BranchNorm(describe(norm="post"), 1, updates=4001)
        residual.set_num_updates(3998)
        exact = residual.scale.clone()
        residual.to(dtype)
        assert residual.scale.dtype == torch.float32 and torch.equal(residual.scale, exact)
        residual.set_num_updates(3999)
        assert residual.scale > exact
        x, output = torch.zeros(T, B, C, dtype=dtype), torch.randn(T, B, C).to(dtype)
        assert residual(x, output, 0, x).dtype == dtype


@pytest.mark.parametrize(
    "depth, base, exponent, factor",
    [
        *[(depth, 6, 1, factor) for depth, factor in ((6, 1), (12, 0.5), (18, 1 / 3), (20, 0.3), (24, 0.25))],
        *[(depth, 2, 1, factor) for depth, factor in ((6, 1 / 3), (12, 1 / 6), (18, 1 / 9), (20, 0.1), (24, 1 / 12))],
        *[(depth, 6, 0.5, factor) for depth, factor in ((6, 1), (12, 0.7071), (18, 0.5774), (20, 0.5477), (24, 0.5))],
        *[(depth, 6, 0, 1) for depth in (6, 24)],
    ],
)
def test_completep_has_the_factors_of_its_table(depth, base, exponent, factor):
    for side in SUBLAYERS:
        residual = CompleteP(Stack(layers=depth, dim=C, side=side), 1, base=base, alpha=exponent)
        assert residual.factor == pytest.approx(factor, abs=5e-5 if exponent == 0.5 else 1e-12)
        assert not list(residual.parameters()) and not residual.state_dict()


@pytest.mark.parametrize("exponent, variances", [(0, (12, 24, 36, 40, 48)), (0.5, (12,) * 5), (1, (12, 6, 4, 3.6, 3))])
def test_unit_branches_add_the_variances_of_the_table(exponent, variances):
    """2 L m^-2a of a stack of L layers with two branches each."""
    for depth, variance in zip((6, 12, 18, 20, 24), variances):
        layers = [CompleteP(Stack(layers=depth, dim=C), n + 1, base=6, alpha=exponent) for n in range(depth)]
        x, added = torch.zeros(1, **DOUBLE), torch.ones(1, **DOUBLE)
        total = sum(float(layer(x, added, index, x)) ** 2 for layer in layers for index in range(2))
        assert total == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("layer, scale", [(1, 1), (4, 0.5), (16, 0.25), (24, 0.2041)])
def test_layernorm_scaling_reads_the_norm_by_the_root_of_the_layer(layer, scale):
    residual, x = LayerNormScaling(describe(layers=24), layer), torch.randn(T, B, C)
    torch.testing.assert_close(residual.scale_input(x), scale * x, rtol=1e-4, atol=1e-4)
    assert residual.scale == layer**-0.5


@pytest.mark.parametrize("depth, default", [(1, 1), (6, 1), (12, 3), (18, 4), (24, 6)])
def test_mix_ln_has_post_norm_in_the_lowest_layers(depth, default):
    for layers, count in ((None, default), (2, 2)):
        connections = [MixLN(describe(layers=depth), number, layers=layers) for number in range(1, depth + 1)]
        assert [not connection.pre_norm for connection in connections] == [number < count for number in range(depth)]


class TestProRes:
    """a_l(t) = min(1, t / (T l)), in the update t from 1."""

    def stack(self, layers=24, period=100):
        return [ProRes(describe(layers=layers), number, period=period) for number in range(1, layers + 1)]

    def test_the_values_of_the_schedule(self):
        layers = self.stack()
        for layer in layers:
            layer.set_num_updates(599)  # update 600 follows
        assert [float(layers[number - 1].scale) for number in (6, 12, 24)] == [1, 0.5, 0.25]
        assert all(float(layer.scale) == 1 for layer in layers[:6]) and float(layers[6].scale) < 1
        for layer in layers:
            layer.set_num_updates(2398)
        assert 0.999 < float(layers[-1].scale) < 1 and all(float(layer.scale) == 1 for layer in layers[:-1])
        for layer in layers:
            layer.set_num_updates(2399)  # T L
            layer.set_num_updates(3)  # a run that counts again
        assert all(float(layer.scale) == 1 for layer in layers)

    @torch.no_grad()
    def test_evaluation_uses_the_saved_values(self, build, batch):
        flags = {"residual": "prores", "prores_period": 8}
        trained, loaded = (build(TINY["pre"], **flags).eval() for _ in range(2))
        trained.train().set_num_updates(3)
        trained.eval()
        loaded.load_state_dict(trained.state_dict())
        assert [float(layer.residual.scale) for layer in loaded.encoder.layers] == [0.5, 0.25]
        assert torch.equal(scores(loaded, batch), scores(trained, batch))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_does_not_round_it(self, dtype):
        residual = ProRes(describe(), 2, period=2001, around="completep")
        residual.set_num_updates(3998)
        exact = residual.scale.clone()
        residual.to(dtype)
        assert residual.scale.dtype == torch.float32 and torch.equal(residual.scale, exact)
        x = torch.ones(T, B, C, dtype=dtype)
        assert residual(x, x.clone(), 0, x).dtype == dtype
