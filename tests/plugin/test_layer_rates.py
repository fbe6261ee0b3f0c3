"""Factors of a parameter on Adam's learning rate and eps (``--completep-rates``): the steps, and who has them."""

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer

from fairseq_deep.plugin.training import adam
from fairseq_deep.plugin.training.adam import FusedAdam, factors_of

RATE, EPS = 0.5, 0.25


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((7, 5), (5,), (3, 4, 2), (1,))]


def train(dtype, rate, eps, marked=()):
    """The weights after six steps, and the optimizer; those with an index in *marked* have the factors."""
    weights = [torch.nn.Parameter(weight.to(dtype)) for weight in gradients(1000)]
    for index in marked:
        weights[index].param_group = (RATE, EPS)
    optimizer = FusedAdam(weights, betas=(0.9, 0.98), eps=1e-3 * eps, weight_decay=0.1)  # an eps that shows
    for step in range(6):
        optimizer.param_groups[0]["lr"] = rate * 0.1 / (1 + step)
        for weight, grad in zip(weights, gradients(step)):
            weight.grad = grad.to(dtype)
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_a_parameter_has_the_steps_of_an_optimizer_of_its_own(dtype, kernel, monkeypatch):
    """Its lr, and so its decoupled decay, and its eps; checkpoints are those of one group."""
    if kernel == "foreach":
        monkeypatch.setattr(adam, "has_fused", lambda device: False)
    elif not adam.has_fused("cpu"):
        pytest.skip("this torch has no fused Adam on a CPU")
    mixed, optimizer = train(dtype, 1, 1, marked=(1, 2))
    plain, scaled = train(dtype, 1, 1)[0], train(dtype, RATE, EPS)[0]
    for index, weight in enumerate(mixed):
        own, other = (scaled, plain) if index in (1, 2) else (plain, scaled)
        assert torch.equal(weight, own[index]) and not torch.equal(weight, other[index])
    groups = optimizer.state_dict()["param_groups"]
    assert len(groups) == 1 and groups[0]["eps"] == 1e-3


@pytest.mark.parametrize("around", [False, True], ids=["completep", "prores around it"])
@pytest.mark.parametrize("alpha, rate, eps", [(1.0, 1.0, 0.25), (0.5, 0.5, 0.5), (0.0, 0.25, 1.0)])
def test_completep_gives_the_factors_of_its_table_to_the_layers(alpha, rate, eps, around, build):
    """At m = 4 in the encoder; the decoder is as deep as its base."""
    flags = {"residual": "prores", "prores_around": "completep"} if around else {"residual": "completep"}
    flags = {**flags, "encoder_layers": 4, "decoder_completep_base": 2.0, "completep_alpha": alpha}
    model = build("transformer_prenorm_2l2l_tiny", **flags, completep_rates=True)
    found = {name for name, weight in model.named_parameters() if factors_of(weight) != (1.0, 1.0)}
    assert found == {name for name, _ in model.named_parameters() if name.startswith("encoder.layers.")}
    assert {factors_of(weight) for weight in model.encoder.layers.parameters()} == {(rate, eps)}
    copies = FP16Optimizer.build_fp32_params(None, list(model.encoder.layers.parameters()), flatten=False)
    assert {factors_of(weight) for weight in copies} == {(rate, eps)}
    plain = build("transformer_prenorm_2l2l_tiny", **flags)
    assert {factors_of(weight) for weight in plain.parameters()} == {(1.0, 1.0)}
