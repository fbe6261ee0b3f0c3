"""Activation recomputation: the same types, the same dropout and the same gradients as without, in less memory."""

import weakref

import pytest
import torch
from torch import nn

TINY = "transformer_dlcl_2l2l_tiny"
FORMS = {"recompute": {"checkpoint_activations": True}, "offload": {"offload_activations": True}}
# with torch's form in fp32, all methods are in test_methods.py
ARCHS = [TINY, "transformer_postnorm_2l2l_tiny", "transformer_lstm_6l", "transformer_matt_6l", "transformer_luna_6l"]
HOW = [("recompute", True), ("offload", False), ("offload", True)]
CASES = [(arch, *how) for arch in ARCHS for how in HOW]


def gradients(model, batch, amp):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        output = model(*batch)[0]
    output.float().square().mean().backward()
    return [output, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("arch, form, amp", CASES)
def test_gradients_are_those_without_recomputation(arch, form, amp, build, batch):
    results = []
    for flags in ({}, FORMS[form]):
        torch.manual_seed(3)
        model = build(arch, dropout=0.1, attention_dropout=0.1, encoder_layers=2, decoder_layers=2, **flags).train()
        results.append(gradients(model, batch, amp))
    if amp and form == "offload":  # fairseq's form sums the gradient of the encoder's output in another order, in bf16
        plain, recomputed = (torch.cat([tensor.flatten() for tensor in result]) for result in results)
        assert (recomputed - plain).norm() < 0.01 * plain.norm()
    else:
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("flags", [{}, *FORMS.values()], ids=["plain", *FORMS])
def test_what_a_layer_computes_is_gone_after_the_forward_pass(flags, build, batch):
    model, inner = build(TINY, dropout=0.1, **flags).train(), []
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.fc2.register_forward_pre_hook(lambda _, inputs: inner.append(weakref.ref(inputs[0])))
    output = model(*batch)[0]
    alive = [ref() is not None for ref in inner]
    assert alive == [not flags] * 4
    output.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_the_inputs_of_layers_are_off_the_device_only_where_asked_for(form, build, batch, monkeypatch):
    """Without a second device at hand: fairseq's form asks for each input on the CPU, torch's asks for none."""
    asked, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **options: asked.append(args) or to(x, *args, **options))
    model = build(TINY, **FORMS[form]).train()
    model(*batch)[0].sum().backward()
    assert ((torch.device("cpu"),) in asked) == (form == "offload")


@pytest.mark.parametrize("flags", [{}, *FORMS.values()], ids=["plain", *FORMS])
def test_a_second_backward_pass_gives_the_same_gradients(flags, build, batch):
    """Where the first layer, recomputed, has set the values of a value residual again."""
    model = build(TINY, value_residual=True, dropout=0.1, **flags).train()
    loss, parameters = model(*batch)[0].square().mean(), [*model.parameters()]
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), once, rtol=1e-5, atol=1e-7)


DDP = {
    "ODE": ("transformer_prenorm_2l2l_tiny", {"layer_agg": "ode", "ode_method": "rk2-learned"}),
    "value residual": ("transformer_postnorm_2l2l_tiny", {"value_residual": True, "decoder_attn": "merged-self"}),
}


@pytest.mark.parametrize("case", DDP)
def test_data_parallel_training_sees_each_parameter_once(case, build, batch, process_group):
    """A layer that is recomputed twice would be marked ready twice; a second pass fails if a gradient was missing."""
    (arch, flags), found = DDP[case], []
    for recompute, wrap in ((False, lambda model: model), (True, nn.parallel.DistributedDataParallel)):
        torch.manual_seed(3)
        wrapped = wrap(build(arch, **flags, dropout=0.1, checkpoint_activations=recompute).train())
        for _ in range(2):
            wrapped(*batch)[0].square().mean().backward()
        found.append([parameter.grad for parameter in wrapped.parameters()])
    torch.testing.assert_close(*found)
