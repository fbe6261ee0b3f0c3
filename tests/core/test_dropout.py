"""Dropout: its place in each method; ``--fast-dropout`` has its distribution; ``--retain-dropout`` keeps it."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_deep.core.aggregators import DepthwiseLstm, Dlcl, Mlrf, Routing
from fairseq_deep.core.aggregators.lstm import GLU, Hidden
from fairseq_deep.core.aggregators.node import Node
from fairseq_deep.core.attention import DECODER_ATTENTIONS, AverageAttention, MultiheadAttention
from fairseq_deep.core.dropout import Dropout, fast_dropout, speed_up_dropout
from fairseq_deep.core.layers import LayerContext
from fairseq_deep.core.layers.layer import BareLayer
from fairseq_deep.core.memories import Transparent
from fairseq_deep.core.stack import MethodConfig, Stack
from tests.helpers.models import make_batch
from tests.helpers.tensors import randomise

C, HALF, QUARTER = 6, 1.5, 1.25  # factors in the place of dropout
STACK = Stack(2, C, ffn_dim=10, dropout=0.5, activation_dropout=0.25)
DECODER = Stack(3, C, side="decoder", other_layers=2)
LSTM = Stack(2, C, side="decoder", heads=2, dropout=0.5,
             aggregator=MethodConfig("lstm", DepthwiseLstm, {"merge": "concat"}),
             attention=MethodConfig("self", DECODER_ATTENTIONS.get("self")))  # fmt: skip
X = torch.randn(4, 7, 3, C, generator=torch.Generator().manual_seed(1))
INNER = {"fc2.weight": HALF * QUARTER, "fc2.bias": HALF}  # after the activation function, and after the network
# modules with dropout, what they compute, and the parameters that have to be larger where there is none
PLACES = {
    "node of an aggregation": (lambda: Node(STACK, 2), lambda part: part([X[0], X[1]]), INNER),
    "map of routing": (lambda: Routing(STACK).maps[0], lambda part: part(X[0]), INNER),
    "MLRF": (lambda: Mlrf(STACK, kind="ffn").fusion, lambda part: part([X[0], X[1]]), {"fc2.weight": QUARTER}),
    "average attention": (lambda: AverageAttention(C, 10, 0.25),
                          lambda part: part(X[0], attn_mask=torch.zeros(1, 1))[0], {"fc2.weight": QUARTER}),
    **{f"hidden of an LSTM, {glu}": (lambda glu=glu: Hidden(2 * C, C, 4 * C, glu, 0.5, 0.25, True),
                                     lambda part: part(torch.cat([X[0], X[1]], -1)), INNER) for glu in GLU},
    "hidden of an LSTM, one layer": (lambda: Hidden(C, C, None, "sigmoid", 0.5, 0.25), lambda part: part(X[0]),
                                     {"output": HALF}),
    "cell of an LSTM": (lambda: DepthwiseLstm(STACK), lambda part: torch.stack(part.write([X[0], X[1]], 0, X[2])),
                        {"hidden.0.fc2.weight": HALF * QUARTER}),
    "cell of an LSTM with dropout of its own": (
        lambda: DepthwiseLstm(STACK, dropout=0.2), lambda part: torch.stack(part.write([X[0], X[1]], 0, X[2])),
        {"hidden.0.fc2.weight": 1.2 * QUARTER}),
    "attentions of an LSTM": (lambda: BareLayer(LSTM, LSTM.sublayers), lambda part: part(X[0], LayerContext(X[1]))[0],
                              {f"{name}_attn.out_proj.weight": HALF for name in ("self", "encoder")}),
    "transparent attention": (lambda: Transparent(STACK, DECODER, dropout=0.5),
                              lambda part: torch.stack(part([*X[:3]], [])), {"weight": HALF}),
    "DLCL": (lambda: Dlcl(STACK, dropout=0.5), lambda part: part.read(part.write(part.start(X[0]), 0, X[1]), 1),
             {"weight": HALF}),
    "post-norm DLCL": (lambda: Dlcl(Stack(2, C, False), dropout=0.5),
                       lambda part: part.read(part.write(part.start(X[0]), 0, X[1]), 1),
                       {"layer_norms.0.weight": HALF, "layer_norms.0.bias": HALF}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_dropout_is_in_its_place_in_training_only(place, monkeypatch):
    """A factor of 1 + p instead of it is the same as larger parameters after it."""
    make, compute, larger = PLACES[place]
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, training=True: x * (1 + p) if training else x)
    module = randomise(make()).train()
    found, without = compute(module), copy.deepcopy(module).eval()
    assert not torch.allclose(compute(without), found)
    for name, factor in larger.items():
        if name != "output":
            without.get_parameter(name).mul_(factor)
    torch.testing.assert_close(compute(without) * larger.get("output", 1.0), found)


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_dropout_of_attention_acts_on_the_weights_in_training_only(need_weights):
    """Values of one, projected by nothing: the output is the sum of the weights that are left, doubled."""
    module = MultiheadAttention(Stack(1, 2, attention_dropout=0.5), bias=False)
    with torch.no_grad():
        module.q_proj.weight.zero_()
        module.out_proj.weight.copy_(torch.eye(2))
        module.v_proj.weight.copy_(torch.eye(2))
    x = torch.ones(8, 40, 2)
    output = module(x, need_weights=need_weights)[0].detach()
    eighths = set((output * 4).round(decimals=4).unique().tolist())
    assert eighths <= set(map(float, range(9))) and len(eighths) > 4
    assert output.mean() == pytest.approx(1.0, abs=0.1)
    torch.testing.assert_close(module.eval()(x, need_weights=need_weights)[0], x)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_its_distribution(probability):
    torch.manual_seed(1)
    x = torch.ones(401, 1003, dtype=torch.float64)
    y = fast_dropout(x, probability)
    torch.manual_seed(1)
    assert torch.equal(fast_dropout(x, probability), y)
    kept = y != 0
    error = 5 * (probability * (1 - probability) / x.numel()) ** 0.5 + 2**-17
    assert abs((~kept).double().mean() - probability) <= error
    assert abs(y.mean() - (1 if probability < 1 else 0)) <= 2 * error / max(1 - probability, 0.1)
    if probability < 1:
        torch.testing.assert_close(y[kept], x[kept] / (1 - probability), rtol=2e-4, atol=0)
    # no entry knows of its neighbours, of which four come from one number, nor rows of each other
    for shift, dim in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 0)):
        both = (kept & kept.roll(shift, dim)).double().mean()
        assert abs(both - (1 - probability) ** 2) <= 2 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (2, 2)], ids=str)
def test_its_gradient_is_the_mask(dtype, shape):
    x = torch.randn(shape).to(dtype).transpose(0, -1).requires_grad_()
    y = fast_dropout(x, 0.25)
    assert y.shape == x.shape and y.dtype == dtype
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * grad, rtol=0, atol=0)
    assert set(grad.flatten().tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


def test_all_parts_that_drop_entries_take_it(monkeypatch):
    model = nn.ModuleList([Dropout(0.5), Dropout(0.5), MultiheadAttention(Stack(1, 8, heads=2, attention_dropout=0.5))])
    speed_up_dropout(model)
    x = torch.ones(20, 3, 8)
    monkeypatch.setattr(F, "dropout", None)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None, raising=False)
    for part in list(model)[:2]:
        assert (part(x) == 0).any()
    out = [model[2](x, causal=True)[0] for _ in range(2)]
    assert not torch.equal(*out)
    model.eval()
    for part in list(model)[:2]:
        assert part(x) is x
    model[1].apply_during_inference = True  # --retain-dropout
    assert (model[1](x) == 0).any()


@pytest.mark.parametrize("name, flags", [
    ("lstm_6l", {}), ("hierarchical_6l", {}), ("routing_6l", {}), ("transparent_16l", {}), ("mlrf_6l", {}),
    ("dlcl_6l", {"dlcl_dropout": 0.1}), ("prenorm_6l", {}),
])  # fmt: skip
def test_retained_dropout_is_retained_in_all_that_connects_layers(name, flags, build):
    """``--retain-dropout``: as many random decisions as in training."""
    model = build(f"transformer_{name}", dropout=0.1, activation_dropout=0.1, **flags)
    drops = [part for part in model.modules() if type(part).__name__.endswith("Dropout") and part.p > 0]
    generation = SimpleNamespace(retain_dropout=True, retain_dropout_modules=None)
    model.eval().prepare_for_inference_(SimpleNamespace(generation=generation))
    assert drops and all(part.apply_during_inference for part in drops)
    generation.retain_dropout_modules = ["TransformerEncoder", "TransformerDecoder"]  # fairseq's names
    model = build(f"transformer_{name}", dropout=0.1, activation_dropout=0.1, **flags).eval()
    model.prepare_for_inference_(SimpleNamespace(generation=generation))
    kept = {key for key, part in model.named_modules() if getattr(part, "apply_during_inference", False)}
    assert kept == {"encoder.dropout_module", "decoder.dropout_module"}


@pytest.mark.parametrize("flags", [{}, {"encoder_attn": "luna", "decoder_attn": "luna"}], ids=str)
def test_compiled_code_takes_torchs_dropout(flags, build, dictionary):
    """--fast-dropout with --compile: torch cannot compile the drawing of bits, nor layers that have it."""
    model = build("transformer_prenorm_6l", attention_dropout=0.1, encoder_layers=1, decoder_layers=1, **flags)
    speed_up_dropout(model.train())
    for layer in (model.encoder.layers[0], model.decoder.layers[0]):
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    source, lengths, target = make_batch(dictionary)
    model(source, lengths, target)[0].sum().backward()
