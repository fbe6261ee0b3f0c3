"""Encoder and decoder layers against fairseq's own with the same weights: outputs, gradients, states."""

import pytest
import torch
from fairseq import utils
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase

from fairseq_deep.core.checkpoints import upgrade_layers
from fairseq_deep.core.description import describe
from fairseq_deep.core.layers import DecoderLayer, EncoderLayer
from fairseq_deep.plugin.models.stacks import add_noise
from tests.helpers.layers import DUPLICATES, C, E, call, config, decoder_inputs, encoder_inputs, inputs
from tests.helpers.tensors import DOUBLE, shake

NEAR = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(autouse=True)
def exact_softmax(monkeypatch):
    """fairseq rounds softmax to fp32; without that, only what is wrong makes a difference."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


both_norms = pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
both_sides = pytest.mark.parametrize("side", ["encoder", "decoder"])


def load(layer, state):
    """Load the *state* of another layer as a whole model would: names and copies of other versions are upgraded."""
    prefix = "encoder.layers.0."
    state = {prefix + name: value for name, value in state.items()}
    upgrade_layers(state)
    layer.load_state_dict({name[len(prefix) :]: value for name, value in state.items()}, strict=True)


def twins(side, no_encoder_attn=False, **flags):
    """fairseq's layer with random weights, and ours with those."""
    cfg = config(no_cross_attention=no_encoder_attn, **flags)
    stack = describe(cfg)[side]
    if side == "encoder":
        stock, ours = TransformerEncoderLayerBase(cfg), EncoderLayer(stack)
        stock.can_use_fastpath = False  # it takes batch x time, which only fairseq's own loop gives it
    else:
        stock, ours = TransformerDecoderLayerBase(cfg, no_encoder_attn), DecoderLayer(stack)
    shake(stock, 0.3)
    load(ours, stock.state_dict())
    return stock.double(), ours.double()


def run(layer, x, options, seed=3):
    """Output, and a dictionary of the gradients of a fixed random direction in it."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    options = {name: value.detach().clone().requires_grad_() if name == "encoder_out" and value is not None else value
               for name, value in options.items()}  # fmt: skip
    output = call(layer, x, **options)
    output = output if torch.is_tensor(output) else output[0]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), **DOUBLE)
    layer.zero_grad()
    (output * direction).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    gradients["x"] = x.grad
    if options.get("encoder_out") is not None:
        gradients["encoder_out"] = options["encoder_out"].grad
    return output.detach(), gradients


def assert_same(stock, ours, x, options):
    expected, wanted = run(stock, x, options)
    actual, gotten = run(ours, x, options)
    torch.testing.assert_close(actual, expected, **NEAR)
    assert gotten.keys() == wanted.keys() - DUPLICATES
    for name, gradient in gotten.items():
        if gradient is None or wanted[name] is None:
            assert gradient is wanted[name] is None, name
            continue
        torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}", **NEAR)
    return gotten


# side, width of the memory, and how many positions are padding in each sentence, of the memory and of the layer's own
INPUTS = [("encoder", None, None, masked) for masked in (None, (2, 3), (-2, -1))]
PADDED = [(None, None), ((2, 3), None), ((-1, -2), (-2, -1))]
INPUTS += [("decoder", dim, *masked) for dim in (C, E) for masked in PADDED]
INPUTS += [("decoder", None, None, (-2, -1))]  # as in a language model


@both_norms
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("side, dim, masked, own_masked", INPUTS)
def test_layers_are_fairseqs(side, dim, masked, own_masked, activation, pre_norm):
    flags = {"pre_norm": pre_norm, "activation_fn": activation, "encoder_dim": dim or C}
    stock, ours = twins(side, no_encoder_attn=side == "decoder" and dim is None, **flags)
    if dim is not None:
        assert ours.encoder_attn.k_proj.weight.shape == ours.encoder_attn.v_proj.weight.shape == (C, dim)
    x, options = encoder_inputs(own_masked) if side == "encoder" else decoder_inputs(dim, masked, own_masked)
    gradients = assert_same(stock.train(), ours.train(), x, options)
    assert all(gradient.any() for name, gradient in gradients.items() if not name.endswith("k_proj.bias"))


@both_norms
def test_a_decoder_layer_that_gets_no_source_is_fairseqs(pre_norm):
    stock, ours = twins("decoder", pre_norm=pre_norm)
    gradients = assert_same(stock.train(), ours.train(), *decoder_inputs(None, target_masked=(-2, -1)))
    assert {name for name in gradients if gradients[name] is None} == {n for n in gradients if "encoder_attn" in n}


@both_norms
@both_sides
def test_dropout_drops_what_fairseq_drops(side, pre_norm):
    """Without padding both draw the same random numbers in the same order."""
    rates = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}
    stock, ours = twins(side, pre_norm=pre_norm, activation_fn="gelu", **rates)
    x, options = inputs(side)
    assert_same(stock.train(), ours.train(), x, options)
    assert not torch.equal(run(ours, x, options)[0], run(ours, x, options, seed=4)[0])
    assert_same(stock.eval(), ours.eval(), x, options)
    assert torch.equal(run(ours, x, options)[0], run(ours, x, options, seed=4)[0])


NAMES = {"encoder": ["TransformerEncoderLayer", "TransformerEncoderLayerBase"],
         "decoder": ["TransformerDecoderLayer", "TransformerDecoderLayerBase"]}  # fmt: skip


@both_sides
@pytest.mark.parametrize("kept", ["all", "attention", "layer", "other"])
def test_retained_dropout_is_fairseqs(side, kept):
    """``--retain-dropout`` keeps dropout while translating, of all modules or of those that are named."""
    stock, ours = twins(side, dropout=0.2, attention_dropout=0.3, activation_dropout=0.1)
    modules = {"all": None, "attention": ["MultiheadAttention"], "layer": NAMES[side], "other": ["Embedding"]}[kept]
    for layer in (stock.eval(), ours.eval()):
        for name, module in layer.named_modules():
            if hasattr(module, "make_generation_fast_"):
                module.make_generation_fast_(name=name, retain_dropout=True, retain_dropout_modules=modules)
    x, options = inputs(side)
    torch.testing.assert_close(run(ours, x, options)[0].double(), run(stock, x, options)[0].double(), **NEAR)
    again = torch.equal(run(ours, x, options)[0], run(ours, x, options, seed=4)[0])
    assert again is (kept == "other")


@both_sides
def test_quantisation_noise_is_on_every_matrix(side):
    """In training each block of 4 weights is gone or, at the rate 1/2, twice as large; else nothing changes."""
    _, ours = twins(side)
    add_noise(torch.nn.ModuleList([ours]), (0.5, 4))
    matrices = {name: module for name, module in ours.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(matrices) == (6 if side == "encoder" else 10)
    before = {name: module.weight.detach().clone() for name, module in matrices.items()}
    x, options = inputs(side)
    call(ours.eval(), x, **options)
    assert all(torch.equal(module.weight, before[name]) for name, module in matrices.items())
    call(ours.train(), x, **options)
    for name, module in matrices.items():
        factor = (module.weight / before[name]).view(-1, 4)
        assert factor.eq(factor[:, :1]).all(), name
        assert set(factor.unique().tolist()) == {0.0, 2.0}, name
    _, plain = twins(side)
    assert not any(module._forward_pre_hooks for module in plain.modules())
