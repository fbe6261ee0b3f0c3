"""DLCL: initial weights, when it is a plain stack, window, checkpoint keys.

Its equations are proven in ``test_aggregators.py``, with LayerDrop in ``test_layer_drop.py``.
"""

import itertools

import pytest
import torch

from fairseq_deep.core import checkpoints
from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import randomise

T, B, C, L = 7, 3, 12, 5


@pytest.mark.parametrize("init", ["avg", "one", "last"])
@pytest.mark.parametrize("window", [None, 1, 3, L + 1, L + 5])
def test_initial_weights(init, window):
    weight = Dlcl(Stack(L, C, True), init=init, window=window).weight
    for row, column in itertools.product(range(L + 1), repeat=2):
        inside = column <= row and (window is None or column > row - window)
        size = min(row + 1, window or row + 1)
        value = {"avg": 1 / size, "one": 1.0, "last": float(row == column)}[init]
        assert weight[row, column].item() == pytest.approx(value if inside else 0.0)


@pytest.mark.parametrize("options", [{}, {"fixed": True}, {"norm_first": True}, {"weight_type": "scalar_3"}], ids=str)
def test_checkpoint_keys_and_shapes_are_the_published_ones(options):
    aggregator = Dlcl(Stack(2, C), **options)
    norms = ["layer_norms.0", "layer_norms.1", *(["first_norm"] if "norm_first" in options else [])]
    keys = {f"{norm}.{part}": (C,) for norm in norms for part in ("weight", "bias")}
    weight = (3, 3, 3) if "weight_type" in options else (3, 3)
    assert {key: tuple(value.shape) for key, value in aggregator.state_dict().items()} == {**keys, "weight": weight}
    assert ("weight" in dict(aggregator.named_parameters())) == ("fixed" not in options)


def test_keys_of_the_original_code_are_renamed():
    theirs, ours = randomise(Dlcl(Stack(L, C, True))), Dlcl(Stack(L, C, True))
    old = {"encoder.history.weight": theirs.weight.detach().unsqueeze(-1)}
    for index, norm in enumerate(theirs.layer_norms):
        old[f"encoder.history.layer_norms.{index + 1}.weight"] = norm.weight.detach()
        old[f"encoder.history.layer_norms.{index + 1}.bias"] = norm.bias.detach()
    for _ in range(2):  # fairseq may upgrade twice
        checkpoints.upgrade_dlcl(ours, old, "encoder.history")
    ours.load_state_dict({key[len("encoder.history.") :]: value for key, value in old.items()})
    for want, got in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(want, got)


@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
def test_only_the_newest_entry_without_a_norm_is_a_plain_stack(weight_type):
    def make(pre_norm=True, **options):
        return Dlcl(Stack(L, C, pre_norm), weight_type=weight_type, **options)

    last = make(no_norm=True, init="last")
    assert last.is_plain()
    assert make(no_norm=True, init="one", window=1).is_plain()
    assert make(no_norm=True, normalize=True, window=1).is_plain()
    assert not make(no_norm=True).is_plain() and not make(no_norm=True, normalize=True).is_plain()
    assert not make(init="last").is_plain() and not make(False, init="last").is_plain()
    with torch.no_grad():
        last.weight[2, 1] += 1e-6
    assert not last.is_plain()


def test_a_window_drops_the_entries_that_nothing_reads():
    aggregator, y_0 = Dlcl(Stack(L, C), window=2), torch.randn(T, B, C)
    with torch.no_grad():
        state = aggregator.start(y_0)
        for index in range(L):
            state = aggregator.write(state, index, y_0)
    assert len(state) == 1 + 2
