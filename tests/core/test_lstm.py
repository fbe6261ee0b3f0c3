"""The depth-wise LSTM and RNN as aggregators: the equations, start values, dropout, recomputation."""

import itertools

import pytest
import torch

from fairseq_deep.core.aggregators.lstm import GLU, DepthwiseLstm, DepthwiseRnn, Gates, Hidden
from tests.helpers.aggregators import make_layers
from tests.helpers.lstm import make, named_steps
from tests.helpers.tensors import DOUBLE, randomise, saved_bytes
from tests.reference.naive_lstm import run_decoder, run_encoder

T, B, C, L = 5, 3, 7, 3


def run(aggregator, x, attentions, merge="add"):
    """A stack as encoder (one attention a layer) and decoder (two, merged by the layer unless it is "two") run it."""

    def merged(pair):
        def layer(x):
            s = pair[0](x)
            return s + pair[1](s) if merge == "add" else torch.cat([s, pair[1](s)], dim=-1)

        return layer

    layers = attentions
    if isinstance(attentions[0], tuple):
        layers = [part for pair in attentions for part in pair] if merge == "two" else [merged(p) for p in attentions]
    state = aggregator.start(x)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
    return aggregator.finish(state)


def naive(aggregator, x, attentions, share, merge, glu):
    norm = aggregator.final_norm
    options = {"glu": glu, "final_norm": None if norm is None else (norm.weight, norm.bias)}
    if not isinstance(attentions[0], tuple):
        return run_encoder(x, attentions, named_steps(aggregator, share, 1), **options)
    steps = named_steps(aggregator, share, 2 if merge == "two" else 1)
    return run_decoder(x, attentions, steps, merge, attn_residual=False, **options)  # as run() calls the layers


BIASES = [{"biases": True}, {"biases": True, "ffn": 1}]
HIDDEN = [{"ffn": 1}, {}, *({"glu": glu, "hidden": 10} for glu in GLU), *BIASES]
SHARING = [
    *((DepthwiseLstm, "add", share) for share in ("none", "gate", "gate-encdec", "all")),
    *((DepthwiseLstm, merge, share) for merge in ("concat", "two") for share in ("none", "gate")),
    *((DepthwiseRnn, merge, share) for merge in ("add", "concat", "two") for share in ("none", "all")),
]


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kind, merge, share", SHARING)
@pytest.mark.parametrize("options", HIDDEN, ids=lambda options: "-".join(map(str, options.values())) or "default")
@pytest.mark.parametrize("final_norm", [False, True], ids=["", "final_norm"])
def test_forward_and_gradients_equal_the_equations(decoder, kind, merge, share, options, final_norm):
    aggregator = make(kind, L, C, merge=merge, share=share, decoder=decoder, final_norm=final_norm, **options).double()
    randomise(aggregator)
    modules = [tuple(make_layers(2 if decoder else 1, C)) for _ in range(L)]
    attentions = modules if decoder else [module for (module,) in modules]
    x = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    sources = [x, *aggregator.parameters(), *(p for layer in modules for part in layer for p in part.parameters())]
    direction = torch.randn(T, B, C, **DOUBLE)

    expected = naive(aggregator, x, attentions, share, merge, options.get("glu", "sigmoid"))
    actual = run(aggregator, x, attentions, merge)
    torch.testing.assert_close(actual, expected)
    expected_grads = torch.autograd.grad(expected, sources, direction)
    actual_grads = torch.autograd.grad(actual, sources, direction)
    for want, got in zip(expected_grads, actual_grads):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_defaults_are_the_papers():
    """Two layers, of the width 4C before the GLU; gates shared in a stack, and nothing in an RNN; no final norm."""
    lstm, rnn = make(DepthwiseLstm, L, C), make(DepthwiseRnn, L, C)
    for aggregator, gates in ((lstm, 1), (rnn, 0)):
        assert (len(aggregator.gates), len(aggregator.hidden)) == (gates, L)
        assert aggregator.final_norm is None
        for hidden in aggregator.hidden:
            assert hidden.fc1.weight.shape == (4 * C, 2 * C)
            assert hidden.fc2.weight.shape == (C, 2 * C)
    shapes = {name: tuple(p.shape) for name, p in lstm.gates[0].named_parameters()}
    assert shapes == {"weight": (3 * C, 2 * C), "norm_weight": (3, C), "norm_bias": (3, C)}, "no bias before a norm"
    names = {name for name, _ in lstm.hidden[0].named_parameters()}
    assert names == {"fc1.weight", "layer_norm.weight", "layer_norm.bias", "fc2.weight"}


def test_printed_biases_start_at_zero_and_change_nothing_else():
    """b_i, b_f, b_o (C each), b_h1 (4C) and b_h2 (C)."""
    printed, counted = make(DepthwiseLstm, L, C, biases=True), make(DepthwiseLstm, L, C)
    added = {name: value for name, value in printed.named_parameters() if name not in counted.state_dict()}
    assert not any(value.any() for value in added.values())
    assert sum(value.numel() for value in added.values()) == 3 * C + L * (4 * C + C)
    printed.load_state_dict(counted.state_dict(), strict=False)
    attentions, x = make_layers(L, C, torch.float32), torch.randn(T, B, C)
    torch.testing.assert_close(run(printed, x, attentions), run(counted, x, attentions))


def test_output_and_cell_start_as_the_embeddings():
    x = torch.randn(T, B, C)
    out, cell = make(DepthwiseLstm, L, C).start(x)
    assert torch.equal(out, x) and torch.equal(cell, x)
    assert [torch.equal(out, x) for out in make(DepthwiseRnn, L, C).start(x)] == [True]


def xavier(matrix):
    """Whether the largest entry is what a uniform Xavier draw of this matrix, by itself, gives."""
    bound = (6 / sum(matrix.shape)) ** 0.5
    return 0.97 * bound < matrix.abs().max() <= bound


@pytest.mark.parametrize("merge", ["add", "concat", "two"])
def test_start_values(merge):
    dim = 32
    aggregator = make(DepthwiseLstm, 2, dim, merge=merge, share="none", decoder=True, forget_bias=1.5, final_norm=True)
    for gates in aggregator.gates:
        assert all(xavier(matrix) for matrix in gates.weight.split(dim))
        assert gates.norm_weight.eq(1).all()
        assert gates.norm_bias[0].eq(0).all() and gates.norm_bias[1].eq(1.5).all() and gates.norm_bias[2].eq(0).all()
    for hidden in aggregator.hidden:
        assert xavier(hidden.fc1.weight) and xavier(hidden.fc2.weight)
        assert hidden.layer_norm.weight.eq(1).all() and hidden.layer_norm.bias.eq(0).all()
    assert aggregator.final_norm.weight.eq(1).all() and aggregator.final_norm.bias.eq(0).all()
    assert Gates(2 * dim, dim, 0.0).norm_bias.eq(0).all()
    assert xavier(Hidden(2 * dim, dim, None, "sigmoid", 0.0, 0.0).fc1.weight)


def test_steps_draw_different_start_values():
    aggregator = make(DepthwiseLstm, 2, 16, share="none")
    assert not torch.equal(aggregator.gates[0].weight, aggregator.gates[1].weight)
    assert not torch.equal(aggregator.hidden[0].fc1.weight, aggregator.hidden[1].fc1.weight)


@pytest.mark.parametrize("glu", GLU)
def test_dropout_acts_on_the_output_of_the_glu_and_on_h(glu):
    hidden = Hidden(2 * 64, 64, 256, glu, dropout=0.5, activation_dropout=0.25)
    inputs = []
    hidden.fc2.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    c = torch.randn(20, 10, 128)
    hidden(c)
    hidden.eval()(c)
    dropped, whole = inputs
    kept = dropped != 0
    alive = whole != 0  # a ReLU makes zeros too
    assert (kept & alive).sum() / alive.sum() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    hidden.train()
    hidden.activation_dropout.eval()
    h, exact = hidden(c), hidden.eval()(c)
    kept = h != 0
    assert kept.float().mean() == pytest.approx(0.5, abs=0.03)
    torch.testing.assert_close(h[kept], 2 * exact[kept])


def test_the_one_layer_form_has_dropout_on_h_alone():
    hidden = Hidden(2 * 64, 64, None, "sigmoid", dropout=0.5, activation_dropout=0.9)
    c = torch.randn(20, 10, 128)
    h, exact = hidden(c), hidden.eval()(c)
    assert (h != 0).float().mean() == pytest.approx(0.5, abs=0.03)
    torch.testing.assert_close(h[h != 0], 2 * exact[h != 0])


def test_dropout_leaves_gates_and_cell_alone():
    """Where h is dropped, Cell is Cell_{i-1} f; elsewhere it has twice the h i of evaluation."""
    aggregator = make(DepthwiseLstm, 1, 64, dropout=0.5)
    old_out, old_cell, attention = torch.randn(3, T, B, 64)
    out, cell = aggregator.write([old_out, old_cell], 0, attention)
    whole_out, whole_cell = aggregator.eval().write([old_out, old_cell], 0, attention)
    z = aggregator.gates[0].inputs(torch.cat([old_out, attention], dim=-1))
    _, forget_gate, output_gate = torch.sigmoid(z).unbind(2)
    carried = old_cell * forget_gate
    dropped = cell == carried
    assert 0.4 < dropped.float().mean() < 0.6
    expected = torch.where(dropped, carried, 2 * whole_cell - carried)
    torch.testing.assert_close(cell, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, cell * output_gate)
    torch.testing.assert_close(whole_out, whole_cell * output_gate)


def test_both_dropouts_reach_every_hidden_module():
    for kind, ffn in itertools.product((DepthwiseLstm, DepthwiseRnn), (1, 2)):
        aggregator = make(kind, L, C, ffn=ffn, dropout=0.3, activation_dropout=0.2)
        assert [(h.dropout.p, h.activation_dropout.p) for h in aggregator.hidden] == [(0.3, 0.2)] * L


def count_calls(aggregator):
    """A list that grows with each start of a hidden computation (recomputation may stop before its end)."""
    calls = []
    for hidden in aggregator.hidden:
        hidden.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kind, merge, share", SHARING)
def test_recomputation_changes_nothing(kind, merge, share):
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        options = {"dropout": 0.3, "activation_dropout": 0.2, "recompute": recompute}
        aggregator = make(kind, L, C, merge=merge, share=share, decoder=True, **options).double()
        modules = [tuple(make_layers(2, C)) for _ in range(L)]
        x = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
        calls = count_calls(aggregator)
        output = run(aggregator, x, modules, merge)
        steps = len(calls)
        assert steps == (2 * L if merge == "two" else L)
        output.square().sum().backward()
        assert len(calls) == (2 * steps if recompute else steps), "each step runs again in the backward pass"
        sources = [x, *aggregator.parameters(), *(p for pair in modules for part in pair for p in part.parameters())]
        results.append([output, *(source.grad for source in sources)])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, plain)


def test_without_training_nothing_is_recomputed():
    aggregator = make(DepthwiseLstm, L, C, recompute=True).eval()
    calls = count_calls(aggregator)
    run(aggregator, torch.randn(T, B, C, requires_grad=True), [torch.nn.Identity()] * L).sum().backward()
    assert len(calls) == L


def test_recomputation_keeps_out_cell_and_attention_only():
    """Three tensors a step at most; how many of them pass the measure depends on torch, which may hold them itself."""
    size = 32 * B * C * 4  # bytes of one tensor

    def growth(recompute):
        def total(layers):
            aggregator = make(DepthwiseLstm, layers, C, recompute=recompute)
            x = torch.randn(32, B, C, requires_grad=True)
            return saved_bytes(lambda: run(aggregator, x, [lambda x: x * 2.0] * layers), aggregator.parameters())

        return (total(2 * L) - total(L)) / L / size

    assert growth(False) > 15, "the measure sees what a plain step saves: c, three gates, the hidden's 4C and 2C, ..."
    assert growth(True) <= 3.01


@pytest.mark.parametrize("kind, entries", [(DepthwiseLstm, 2), (DepthwiseRnn, 1)])
def test_the_state_does_not_grow_and_is_not_kept(kind, entries):
    aggregator = make(kind, L, C)
    before = {name: set(vars(module)) for name, module in aggregator.named_modules()}
    state = aggregator.start(torch.randn(T, B, C))
    for index in range(L):
        given = list(state)
        new = aggregator.write(state, index, torch.randn(T, B, C))
        assert len(new) == entries
        assert len(state) == entries and all(a is b for a, b in zip(state, given)), "the old state is left as it was"
        state = new
    assert {name: set(vars(module)) for name, module in aggregator.named_modules()} == before
    assert sorted(aggregator.state_dict()) == sorted(name for name, _ in aggregator.named_parameters())


def test_an_initialisation_fills_each_gate_by_itself():
    """A bound of the fan-in and fan-out of three gates as one matrix would be another."""
    lstm = make(DepthwiseLstm, 2, C, share="none")
    gates = lstm.matrices()[:6]
    assert [tuple(matrix.shape) for matrix in gates] == 6 * [(C, 2 * C)]
    assert sum(matrix.numel() for matrix in gates) == sum(part.weight.numel() for part in lstm.gates)
