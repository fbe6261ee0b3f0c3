"""The depth-wise LSTM and RNN: memory, compiled code, flags, sharing.

The equations are proven in ``test_whole_models.py``, counts in ``test_counts.py``.
"""

import copy

import pytest
import torch

from fairseq_deep.core.aggregators.lstm_cell import lstm_cell
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.aggregators import make, run
from tests.helpers.flags import parse
from tests.helpers.methods import LSTM as TINY
from tests.helpers.models import task_of
from tests.helpers.tensors import saved_bytes, shake

T, B, C, L = 5, 3, 7, 3


def aggregators(model):
    return model.encoder.aggregator, model.decoder.aggregator


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
