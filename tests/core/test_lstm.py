"""The depth-wise LSTM and RNN: memory, compiled code, sharing.

The equations are proven in ``test_whole_models.py``, counts in ``test_counts.py``.
"""

import copy

import pytest
import torch

from fairseq_deep.core.aggregators.lstm_cell import lstm_cell
from fairseq_deep.core.registry import UsageError
from tests.helpers.aggregators import make, run
from tests.helpers.methods import LSTM as TINY
from tests.helpers.models import size_of
from tests.helpers.tensors import saved_bytes, shake

T, B, C, L = 5, 3, 7, 3


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


# --- sharing ---


@pytest.mark.parametrize("share", ["none", "gate", "gate-encdec", "all"])
def test_what_is_shared_is_stored_once_and_stays_shared(share, build, batch):
    """In the model and its checkpoint, in copies of the model, and in wrappers such as DDP."""
    model, other = (shake(build(TINY, lstm_share=share).eval()) for _ in range(2))
    state = model.state_dict()
    for tensors in (model.parameters(), [tensor for key, tensor in state.items() if ".history." in key]):
        pointers = [tensor.data_ptr() for tensor in tensors]
        assert len({*pointers}) == len(pointers), "nothing is there twice"
    wrapped = torch.nn.ModuleDict({"module": other})
    wrapped.load_state_dict({f"module.{key}": value for key, value in state.items()}, strict=True)
    assert wrapped.state_dict().keys() == {f"module.{key}" for key in state}
    expected, copied = model(*batch)[0], copy.deepcopy(other)
    assert torch.equal(other(*batch)[0], expected) and size_of(copied) == size_of(model)
    shake(copied)
    assert torch.equal(other(*batch)[0], expected)


def test_stacks_of_one_large_width_share(build):
    """Python has one object for each small integer, and several for 512."""
    widths = {"encoder_embed_dim": 512, "decoder_embed_dim": int("512")}
    model = build(TINY, lstm_share="gate-encdec", **widths)
    assert model.encoder.aggregator.gates is model.decoder.aggregator.gates


@pytest.mark.parametrize("theirs, ours", [("gate", "gate-encdec"), ("gate-encdec", "gate"), ("all", "none")])
def test_a_checkpoint_with_another_sharing_is_refused(theirs, ours, build):
    model = build(TINY, lstm_share=ours)
    with pytest.raises(UsageError, match="another architecture"):
        model.load_state_dict(build(TINY, lstm_share=theirs).state_dict(), strict=True)
