"""fairseq's fp16 optimizer on a model of two precisions: the DLCL weights stay in fp32, all else is fp16."""

import copy

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf

from fairseq_deep.core.dropout import Dropout
from tests.helpers.methods import METHODS, OPTIONS
from tests.helpers.models import make_batch

# relative error of the whole gradient in fp16; EM routing divides by variances that can be near to nothing
ERRORS = {"layer_agg-routing": 0.5}


def optimizer_for(model, flatten):
    common = dict(fp16_init_scale=128, fp16_scale_window=None, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    common.update(min_loss_scale=1e-4, bf16=False, on_cpu_convert_precision=False, tpu=False, model_parallel_size=1)
    adam = dict(_name="adam", adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.0, use_old_adam=True)
    adam.update(fp16_adam_stats=False, tpu=False, lr=[0.001])
    config = {
        "common": {**common, "fp16_no_flatten_grads": not flatten},
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1], "lr": [0.001]},
        "optimizer": adam,
    }
    return FP16Optimizer.build_optimizer(OmegaConf.create(config), list(model.parameters()))


@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "separate"])
def test_a_step_moves_every_parameter_as_in_fp32(build, dictionary, monkeypatch, flatten):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # fairseq asks for it without a GPU, too
    exact = build("transformer_dlcl_2l2l_tiny").train()
    model = copy.deepcopy(exact).half()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "encoder.history.weight", "decoder.history.weight"
    }  # fmt: skip
    batch = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_for(model, flatten)
    optimizer.backward(model(*batch)[0].float().log_softmax(-1)[..., 5].sum().neg())
    exact(*batch)[0].log_softmax(-1)[..., 5].sum().neg().backward()
    expected = torch.linalg.vector_norm(torch.cat([parameter.grad.view(-1) for parameter in exact.parameters()]))
    assert float(optimizer.clip_grad_norm(0.0)) / 128 == pytest.approx(float(expected), rel=0.02)
    optimizer.multiply_grads(1.0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtypes[name]
        moved = (parameter.float() - before[name].float()).abs().max()
        assert parameter.isfinite().all() and moved > 0 or name.endswith("k_proj.bias"), name


@pytest.mark.parametrize("case", [*METHODS, *OPTIONS])
def test_gradients_are_near_to_those_in_fp32(case, build, dictionary):
    name, flags = {**METHODS, **OPTIONS}[case]
    exact, batch = build(name, **flags).train(), make_batch(dictionary)
    with torch.no_grad():
        for parameter in exact.parameters():  # no gate closed, and what fp16 holds
            parameter.copy_(parameter.add(0.02 * torch.randn_like(parameter)).half())
    for module in exact.modules():
        if isinstance(module, Dropout):  # those that flags ask for, and their defaults
            module.p = 0.0
    words, gradients = torch.randint(len(dictionary), (batch[2].numel(),)), []
    for model in (exact, copy.deepcopy(exact).half()):
        output = model(*batch)[0]
        assert output.dtype == model.decoder.output_projection.weight.dtype
        (128 * torch.nn.functional.cross_entropy(output.float().flatten(0, 1), words)).backward()
        gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()
                                    if parameter.requires_grad]))  # fmt: skip
    assert gradients[1].isfinite().all()
    assert (gradients[1] - gradients[0]).norm() < ERRORS.get(case, 0.05) * gradients[0].norm()
