"""The depth-wise LSTM and RNN: cell, initial values, sharing, flags.

The equations are proven in ``test_whole_models.py``, counts in ``test_counts.py``.
"""

import copy

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.core.aggregators.lstm import Gates, Hidden
from fairseq_deep.core.aggregators.lstm_cell import lstm_cell, norm_gates
from fairseq_deep.core.layers import LayerContext
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.aggregators import make, run
from tests.helpers.flags import parse
from tests.helpers.methods import LSTM as TINY
from tests.helpers.models import make_batch, task_of
from tests.helpers.tensors import DOUBLE, assert_same, is_uniform, saved_bytes, shake
from tests.reference.naive_dlcl import layer_norm

T, B, C, L = 5, 3, 7, 3
TWO = {"lstm_merge": "two"}


def aggregators(model):
    return model.encoder.aggregator, model.decoder.aggregator


def is_xavier(matrix):
    """Whether it looks like a uniform Xavier draw of this matrix by itself."""
    return is_uniform(matrix, (6 / sum(matrix.shape)) ** 0.5)


def test_initial_values_and_the_papers_defaults():
    """Gates shared in a stack, and nothing in an RNN; two layers of the width 4C; each gate drawn as its own matrix."""
    lstm, rnn = make("lstm", L, 32), make("rnn", L, 32)
    assert (len(lstm.gates), len(lstm.hidden)) == (1, L) and (len(rnn.gates), len(rnn.hidden)) == (0, L)
    assert lstm.final_norm is None
    names = {"fc1.weight", "layer_norm.weight", "layer_norm.bias", "fc2.weight"}
    assert {name for name, _ in lstm.hidden[0].named_parameters()} == names
    assert (lstm.hidden[0].fc1.weight.shape, lstm.hidden[0].fc2.weight.shape) == ((128, 64), (32, 64))
    assert lstm.gates[0].norm_bias.eq(torch.tensor([[0.0], [5.0], [0.0]])).all(), "only forget gates are open"
    lstm = make("lstm", L, 32, share="none", forget_bias=1.5, biases=True, final_norm=True)
    for gates in lstm.gates:
        assert all(is_xavier(matrix) for matrix in gates.weight.split(32))
        assert gates.norm_weight.eq(1).all() and gates.norm_bias[1].eq(1.5).all()
    assert all(is_xavier(linear.weight) for hidden in lstm.hidden for linear in (hidden.fc1, hidden.fc2))
    biases = [part.bias for part in (*lstm.gates, *(part for each in lstm.hidden for part in (each.fc1, each.fc2)))]
    assert not any(bias.any() for bias in biases) and sum(map(torch.numel, biases)) == L * (3 + 4 + 1) * 32
    assert not torch.equal(lstm.gates[0].weight, lstm.gates[1].weight), "steps start differently"
    for matrix, own in zip(lstm.matrices(), (part for gates in lstm.gates for part in gates.weight.split(32))):
        assert matrix.data_ptr() == own.data_ptr() and matrix.shape == (32, 64), "an initialisation fills each gate"
    assert Gates(64, 32, 0.0).norm_bias.eq(0).all() and is_xavier(Hidden(64, 32, None, "sigmoid", 0, 0).fc1.weight)


def test_recomputation_keeps_out_cell_and_attention_only():
    """Three tensors per step at most; torch itself may hold some of them."""

    def kept(layers, recompute):
        aggregator = make("lstm", layers, C, stack={"recompute": recompute})
        x = torch.randn(32, B, C, requires_grad=True)
        return saved_bytes(lambda: run(aggregator, x, [lambda x: x * 2.0] * layers), aggregator.parameters())

    plain, recomputed = ((kept(2 * L, on) - kept(L, on)) / L / (32 * B * C * 4) for on in (False, True))
    assert plain > 15, "the measure sees what a plain step saves: c, three gates, the hidden's 4C and 2C, ..."
    assert recomputed <= 3.01
    aggregator, calls = make("lstm", L, C, stack={"recompute": True}), []
    for hidden in aggregator.hidden:
        hidden.register_forward_pre_hook(lambda *_: calls.append(1))
    for training in (True, False):
        x = torch.randn(T, B, C, requires_grad=True)
        run(aggregator.train(training), x, [torch.nn.Identity()] * L).sum().backward()
    assert len(calls) == 2 * L + L, "nothing is recomputed in evaluation"


# --- gates and cell: the fast forms against the plain ones ---


def plain_norm(x, weight, bias):
    return torch.stack([layer_norm(x.unflatten(2, (3, C))[:, :, n], weight[n], bias[n]) for n in range(3)], dim=2)


def gate_inputs(gates, c):
    """The inputs of the sigmoids."""
    return norm_gates(gates.products(c), gates.norm_weight, gates.norm_bias)


def test_the_norms_of_gates_and_their_gradients_equal_the_equation():
    inputs = [torch.randn(shape, requires_grad=True, **DOUBLE) for shape in ((T, B, 3 * C), (3, C), (3, C))]
    actual, expected = norm_gates(*inputs), plain_norm(*inputs)
    assert_same(actual, expected, inputs, rtol=1e-6, atol=1e-9)


def test_a_step_keeps_three_gates_h_and_two_cells():
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((T, B, 3, C), (T, B, C), (T, B, C))]
    assert saved_bytes(lambda: lstm_cell(*inputs), []) == 6 * T * B * C * 4


def test_a_compiler_sees_the_formula_in_one_graph():
    """Gradients are its own, too."""
    aggregator, graphs = make("lstm", 2, C).to("meta"), []
    state = [torch.randn(T, B, C, device="meta", requires_grad=True) for _ in range(2)]

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compile(aggregator.write, backend=backend, fullgraph=True)(state, 1, state[0] * 2)
    (graph,) = graphs
    assert "sigmoid" in graph and "layer_norm" in graph
    assert "autograd_function" not in graph and "group_norm" not in graph


# --- whole models ---


def test_dropout_acts_on_the_output_of_each_attention(build):
    """Also before the first one's output becomes part of the query of a decoder layer's second attention."""
    model = build(TINY, dropout=0.5, lstm_merge="concat")
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    (x, memory), alone = torch.randn(2, 12, 5, 16), LayerContext()
    s, a = decoder(x, LayerContext(memory))[0].chunk(2, dim=-1)
    whole_s = decoder.self_attn(decoder.self_attn_layer_norm(x))[0]
    whole_a = decoder.encoder_attn(decoder.encoder_attn_layer_norm(x + s), memory)[0]
    for dropped, whole in ((encoder(x, alone)[0], encoder.eval()(x, alone)[0]), (s, whole_s), (a, whole_a)):
        kept = dropped != 0
        assert 0.4 < kept.float().mean() < 0.6
        torch.testing.assert_close(dropped[kept], 2 * whole[kept])


@pytest.mark.parametrize("depth, flags", [(24, {}), (6, TWO), (6, {"lstm_merge": "concat"}), (6, {"lstm_ffn": 1})])
def test_activations_stay_in_range_at_the_start(depth, flags, build, dictionary):
    """Of each layer, not only of the last: Out and Cell neither vanish nor explode; forget gates are nearly open."""
    numbers = (("layers", depth), ("embed_dim", 64))
    sizes = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in numbers}
    model = build("transformer_lstm_6l", **sizes, **flags).eval()
    states, gates = [], []

    def opened(module, inputs, outputs):
        states.append(outputs)
        gates.append(torch.sigmoid(gate_inputs(module, inputs[0])).movedim(2, 0).flatten(1, 2))

    for part in (part for aggregator in aggregators(model) for part in aggregator.gates):
        part.register_forward_hook(opened)
    with torch.no_grad():
        model(*make_batch(dictionary, lengths=(12,) * 6, target_lengths=(12,) * 6))
    assert len(states) == depth * (3 if flags == TWO else 2)
    for out, cell in states:
        assert 0.1 < out.std() < 2.0 and 0.2 < cell.std() < 3.0
    for gate, mean, least in zip(torch.cat(gates, dim=1), (0.5, 0.99, 0.5), (0.04, 0.005, 0.04)):
        assert gate.mean() == pytest.approx(mean, abs=0.02)
        assert least < gate.std() < 0.3, "open to different degrees"


# --- flags ---


def test_flags_reach_every_part(dictionary):
    """Of both stacks; dropout on h is the model's, unless it has its own."""
    lines = {
        "--lstm-hidden 48 --lstm-glu relu --lstm-forget-bias 2 --lstm-dropout 0.2 --dropout 0.5": (48, "relu", 2, 0.2),
        "--dropout 0.5 --relu-dropout 0.3": (64, "sigmoid", 5, 0.5),
    }
    for line, (width, glu, bias, dropout) in lines.items():
        args = parse("--arch", TINY, "--encoder-embed-dim", "16", *line.split())
        for aggregator in aggregators(DeepTransformerModel.build_model(args, task_of(dictionary))):
            assert all(gates.norm_bias[1].eq(bias).all() for gates in aggregator.gates)
            for hidden in aggregator.hidden:
                assert (hidden.fc1.out_features, hidden.fc2.in_features, hidden.glu) == (width, width // 2, glu)
                assert (hidden.dropout.p, hidden.activation_dropout.p) == (dropout, args.activation_dropout)
    assert args.activation_dropout == 0.3


LSTM, PLAIN = "--arch transformer_lstm_6l", "--arch transformer_prenorm_6l"


@pytest.mark.parametrize(
    "line, widths, pre_norm, attn_residual",
    [
        (LSTM, (0, 0), (False, False), True),
        (f"{LSTM} --lstm-no-attn-residual", (0, 0), (False, False), False),
        ("--arch transformer_lstm_two_6l", (0, 0), (False, False), None),
        (f"{LSTM} --decoder-layer-agg residual --decoder-ffn-embed-dim 96", (0, 96), (False, True), None),
        (f"{LSTM} --encoder-layer-agg dlcl --encoder-normalize-before", (2048, 0), (True, False), True),
        (f"{PLAIN} --decoder-layer-agg rnn --encoder-ffn-embed-dim 96", (96, 0), (True, False), True),
        ("--arch deep_transformer --decoder-layer-agg lstm", (2048, 0), (False, False), True),
    ],
)
def test_presets_fit_the_aggregator_of_each_stack(line, widths, pre_norm, attn_residual):
    """Also when fairseq applies the architecture again to the flags that a checkpoint holds."""
    args = parse(*line.split())
    assert (args.encoder_ffn_embed_dim, args.decoder_ffn_embed_dim) == widths
    assert (bool(args.encoder_normalize_before), bool(args.decoder_normalize_before)) == pre_norm
    assert args.activation_fn == ("gelu" if widths == (0, 0) else "relu")
    assert getattr(args, "lstm_attn_residual", None) is attn_residual, "a checkpoint of before does not say it"
    before = dict(vars(args))
    ARCH_CONFIG_REGISTRY[args.arch](args)
    assert vars(args) == before
    with pytest.raises(UsageError, match="--decoder-ffn-embed-dim .*use --lstm-hidden"):
        parse(*LSTM.split(), "--decoder-ffn-embed-dim", "8")


# --- sharing: {mode: (gate sets and hidden computations of the encoder, and of the decoder, in a checkpoint)} ---

SETS = {"none": ((2, 2), (2, 2)), "gate": ((1, 2), (1, 2)), "gate-encdec": ((1, 2), (0, 2)), "all": ((1, 1), (0, 1))}


def modules(state, stack, kind):
    """Indices of the shared modules of *kind* that are in a state dictionary."""
    prefix = f"{stack}.history.{kind}."
    return {key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)}


@pytest.mark.parametrize("share", SETS)
def test_a_shared_module_is_one_object_and_one_entry(share, build, batch):
    """In the model and its checkpoint, which restores it; in copies of the model, and in wrappers such as DDP."""
    model, other = (shake(build(TINY, lstm_share=share).eval()) for _ in range(2))
    state, across = model.state_dict(), share in ("gate-encdec", "all")
    for stack, (gates, hidden) in zip(("encoder", "decoder"), SETS[share]):
        assert (len(modules(state, stack, "gates")), len(modules(state, stack, "hidden"))) == (gates, hidden)
    for tensors in (model.parameters(), [tensor for key, tensor in state.items() if ".history." in key]):
        pointers = [tensor.data_ptr() for tensor in tensors]
        assert len({*pointers}) == len(pointers), "nothing is there twice"
    wrapped = torch.nn.ModuleDict({"module": other})
    wrapped.load_state_dict({f"module.{key}": value for key, value in state.items()}, strict=True)
    assert wrapped.state_dict().keys() == {f"module.{key}" for key in state}
    assert torch.equal(other(*batch)[0], model(*batch)[0])
    for one in (model, other, copy.deepcopy(model).half()):
        encoder, decoder = aggregators(one)
        assert (encoder.gates[0] is decoder.gates[0]) is across
        assert (encoder.gates[0].weight is decoder.gates[0].weight) is across
        assert encoder.hidden[0] is not decoder.hidden[0]
    assert aggregators(copy.deepcopy(model))[0].gates[0] is not aggregators(model)[0].gates[0]


def test_stacks_of_one_large_width_share(build):
    """Python has one object for each small integer, and several for 512."""
    widths = {"encoder_embed_dim": 512, "decoder_embed_dim": int("512")}
    encoder, decoder = aggregators(build(TINY, lstm_share="gate-encdec", **widths))
    assert encoder.gates is decoder.gates


@pytest.mark.parametrize("theirs, ours", [("gate", "gate-encdec"), ("gate-encdec", "gate"), ("all", "none")])
def test_a_checkpoint_with_another_sharing_is_refused(theirs, ours, build):
    model = build(TINY, lstm_share=ours)
    with pytest.raises(UsageError, match="another architecture"):
        model.load_state_dict(build(TINY, lstm_share=theirs).state_dict(), strict=True)
