"""Residual connections: initial values, schedules, precision; equations are in ``test_whole_models.py``."""

import io
import logging

import pytest
import torch

from fairseq_deep.core.residuals.branchnorm import BranchNorm
from fairseq_deep.core.residuals.layernorm_scaling import LayerNormScaling
from fairseq_deep.core.residuals.layerscale import LayerScale
from fairseq_deep.core.residuals.mix_ln import MixLN
from fairseq_deep.core.residuals.prores import ProRes
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.training.adam import factors_of
from fairseq_deep.plugin.training.fp16 import FP16Optimizer
from tests.helpers.models import TINY

T, B, C = 3, 2, 6
SUBLAYERS = {"encoder": 2, "decoder": 3}


def describe(norm="pre", layers=2):
    return Stack(layers=layers, dim=C, pre_norm=norm == "pre")


# --- initial values and constants ---


@pytest.mark.parametrize("depth, start", [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (60, 1e-6)])
def test_layerscale_starts_by_the_depth_of_its_stack(depth, start):
    for stack in (Stack(layers=depth, dim=C, other_layers=6), Stack(layers=depth, dim=C, side="decoder")):
        weight = LayerScale(stack, 1).weight
        assert weight.shape == (SUBLAYERS[stack.side], C) and weight.eq(torch.tensor(start)).all()
        assert LayerScale(stack, 1, start=0.5).weight.eq(0.5).all()


FACTORS = [  # of stacks with 3 and 2 layers
    ({"completep_base": 6.0, "encoder_completep_base": 1.5}, 0.5, 3.0),
    ({"completep_alpha": 0.0, "decoder_completep_alpha": 0.5}, 1.0, 2**-0.5),
]


@pytest.mark.parametrize("flags, encoder, decoder", FACTORS, ids=str)
def test_completep_has_the_factor_of_its_depth_and_base(flags, encoder, decoder, build):
    model = build(TINY["pre"], encoder_layers=3, decoder_layers=2, residual="completep", **flags)
    for stack, factor in ((model.encoder, encoder), (model.decoder, decoder)):
        assert {layer.residual.factor for layer in stack.layers} == {factor}


def test_completep_logs_a_deeper_base_and_unscaled_rates_once(build, caplog):
    with caplog.at_level(logging.INFO, logger="fairseq_deep.core.residuals.completep"):
        build(TINY["pre"], residual="completep", completep_base=2.0)
        build(TINY["pre"], residual="completep", completep_alpha=0.5, completep_rates=True)
        assert not caplog.messages
        build(TINY["pre"], residual="completep", encoder_completep_base=6.0, completep_alpha=0.5)
    deeper = "encoder: --residual completep, base 6 is deeper than the 2 layers: branches have the factor 1.732"
    assert caplog.messages.count(deeper) == 1 and len(caplog.messages) == 3
    assert sum("add --completep-rates" in message for message in caplog.messages) == 2


@pytest.mark.parametrize("around", [False, True], ids=["completep", "prores around it"])
@pytest.mark.parametrize("alpha, rate, eps", [(1.0, 1.0, 0.25), (0.5, 0.5, 0.5), (0.0, 0.25, 1.0)])
def test_completep_gives_the_factors_of_its_table_to_the_layers(alpha, rate, eps, around, build):
    """At m = 4 in the encoder; the decoder is as deep as its base."""
    flags = {"residual": "prores", "prores_around": "completep"} if around else {"residual": "completep"}
    flags = {**flags, "encoder_layers": 4, "decoder_completep_base": 2.0, "completep_alpha": alpha}
    model = build(TINY["pre"], **flags, completep_rates=True)
    found = {name for name, weight in model.named_parameters() if factors_of(weight) != (1.0, 1.0)}
    assert found == {name for name, _ in model.named_parameters() if name.startswith("encoder.layers.")}
    assert {factors_of(weight) for weight in model.encoder.layers.parameters()} == {(rate, eps)}
    copies = FP16Optimizer.build_fp32_params(None, list(model.encoder.layers.parameters()), flatten=False)
    assert {factors_of(weight) for weight in copies} == {(rate, eps)}
    assert {factors_of(weight) for weight in build(TINY["pre"], **flags).parameters()} == {(1.0, 1.0)}


def test_layernorm_scaling_and_mix_ln_count_layers():
    assert [LayerNormScaling(describe(layers=24), layer).scale for layer in (1, 4, 16, 24)] == [1, 0.5, 0.25, 24**-0.5]
    for depth, layers, count in ((1, None, 1), (6, None, 1), (12, None, 3), (18, None, 4), (24, None, 6), (6, 2, 2)):
        connections = [MixLN(describe(layers=depth), number, layers=layers) for number in range(1, depth + 1)]
        assert [not connection.pre_norm for connection in connections] == [number < count for number in range(depth)]


# --- BranchNorm, a_t = min(1, t / T), and ProRes, a_l(t) = min(1, t / (T l)), in the update t from 1 ---


def size_of_branches(model):
    """a_t of a model, or of connections; the same in all layers."""
    (value,) = {float(module.scale) for module in model.modules() if isinstance(module, BranchNorm)}
    return value


def test_branchnorm_grows_update_by_update_and_stays():
    residual = BranchNorm(describe(norm="post"), 1, updates=8)
    assert size_of_branches(residual) == 1 / 8
    for done in range(20):
        for _ in range(2):  # fairseq tells it for each batch of an update
            residual.set_num_updates(done)
        assert size_of_branches(residual) == min(1.0, (done + 1) / 8)
    assert size_of_branches(BranchNorm(describe(norm="post"), 1)) == pytest.approx(1 / 4000)


def test_prores_has_its_schedule_in_each_layer():
    layers = [ProRes(describe(layers=24), number, period=100) for number in range(1, 25)]
    last = ((2398, {23: 1, 24: 2399 / 2400}), (2399, {24: 1}), (3, {24: 1}))  # at last in a run that counts again
    for done, sizes in ((599, {6: 1, 7: 6 / 7, 12: 0.5, 24: 0.25}), *last):
        for layer in layers:
            layer.set_num_updates(done)
        assert {number: float(layers[number - 1].scale) for number in sizes} == pytest.approx(sizes)


def test_a_checkpoint_keeps_the_size_of_the_branches(build, batch):
    """For generation, and for resumed training; fairseq sets the number of updates before it loads."""
    make = lambda: build(TINY["post"], residual="branchnorm", branchnorm_updates=8)  # noqa: E731
    first, resumed, finetuned = make(), make(), make()
    first.set_num_updates(4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    resumed.set_num_updates(5)
    for model in (resumed, finetuned):
        file.seek(0)
        model.load_state_dict(torch.load(file))
        assert size_of_branches(model) == 5 / 8
        torch.testing.assert_close(model.eval()(*batch)[0], first.eval()(*batch)[0])
    resumed.set_num_updates(5)
    assert size_of_branches(resumed) == 6 / 8
    finetuned.set_num_updates(0)
    assert size_of_branches(finetuned) == 5 / 8, "what was trained with open branches keeps them"


IN_FP32 = [(LayerScale, {"start": 1e-6}, "weight"), (BranchNorm, {"updates": 4001}, "scale"),
           (ProRes, {"period": 4001}, "scale")]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, options, name", IN_FP32, ids=str)
def test_half_precision_does_not_round_the_size_of_the_branches(kind, options, name, dtype):
    """1e-6 is a subnormal number of fp16, and 1 - 1/4001 is none; the sum is rounded once."""
    residual = kind(describe(norm="post"), 1, **options)
    if kind is LayerScale:
        residual.weight.data.mul_(1 + torch.rand_like(residual.weight))
    else:
        residual.set_num_updates(3998)
    exact = getattr(residual, name).detach().clone()
    residual.to(dtype)
    assert getattr(residual, name).dtype == torch.float32 and torch.equal(getattr(residual, name), exact)
    x, output = torch.zeros(T, B, C, dtype=dtype), 1000 * torch.randn(T, B, C).to(dtype)
    factor = exact[1] if kind is LayerScale else exact
    torch.testing.assert_close(residual(x, output, 1, x), (factor * output.float()).to(dtype), rtol=0, atol=0)
