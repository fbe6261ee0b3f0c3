"""Decoding steps as compiled graphs, over caches of a fixed capacity, against PyTorch's."""

import logging

import pytest
import torch

from fairseq_deep.core.attention import multihead
from fairseq_deep.core.registry import UsageError
from tests.helpers.steps import BEAM, MODELS, near, orders, steps, without_kernels
from tests.helpers.tensors import Kernels

ROUNDED = {"rtol": 1e-4, "atol": 1e-4}
WITHOUT_COMPILER = {"backend": "eager"}  # traces, and runs what it has traced
COMPILED = ("pre", "learned positions", "sums between layers", "a memory per layer", "relative positions",
            "value residual", "average attention", "SSRU", "merged attention", "Luna", "LSTM", "languages")  # fmt: skip
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def counters():
    """What torch.compile has done."""
    from torch._dynamo import reset, utils

    reset()
    utils.counters.clear()
    logging.disable(logging.INFO)  # torch logs each graph at length, if only pytest listens
    yield utils.counters
    logging.disable(logging.NOTSET)
    reset()


@pytest.mark.parametrize("name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.nightly)
                                  for name in MODELS])  # fmt: skip
def test_all_compiled_steps_are_one_graph(name, prepared, counters):
    """The same tokens as without compilation: no graph break, no recompilation as hypotheses grow."""
    model, script = prepared(name, decoder_layers=2 if "residual" in name else 1), list(orders(9))
    padded = [(1, 1), (6, 3)]
    expected = steps(model, script, padded=padded)
    model.decoder.compile_steps(**WITHOUT_COMPILER)
    actual = steps(model, script, padded=padded)
    near(actual, expected, **ROUNDED)
    assert all(torch.equal(got.argmax(-1), want.argmax(-1)) for got, want in zip(actual, expected))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_room_is_doubled_with_one_more_graph(prepared, counters):
    """70 positions: room for 64, and then for 128."""
    model, state, script = prepared("pre", decoder_layers=1), {}, list(orders(69))
    expected = steps(model, script)
    model.decoder.compile_steps(**WITHOUT_COMPILER)
    near(steps(model, script, state), expected, **ROUNDED)
    assert counters["stats"]["unique_graphs"] == 2
    caches = [saved["cache"] for key, saved in state.items() if key.endswith("target")]
    assert {cache.size(3) for cache in caches} == {128 * BEAM}


MOVING = [[3, 4, 5, 0, 1, 2, 6, 6, 7], [4, 3, 5, 6, 7, 8], [1, 0, 2, 5, 5, 4], [0, 3, 1, 5], [3, 2, 1, 0]]


@pytest.mark.parametrize("name", ["merged attention", "relative positions"])
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "traced"])
def test_sentences_that_end_move_or_are_split(name, traced, prepared, counters):
    model, script = prepared(name, decoder_layers=1), [*orders(2), *map(torch.tensor, MOVING)]
    expected = steps(model, script)
    model.decoder.compile_steps(dynamic=True, **WITHOUT_COMPILER)
    if not traced:
        model.decoder.compiled.compiled = model.decoder.compiled.run
    near(steps(model, script), expected, **ROUNDED)
    assert not counters["graph_break"]


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_compiled_step_needs_no_synchronisation_and_writes_in_place(fused, prepared, monkeypatch):
    """As a graph of a device requires it: caches stay where they are."""
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: fused)
    model, state, places, asked = prepared("pre", no_token_positional_embeddings=True), {}, [], []
    expected, step = without_kernels(lambda: steps(model, orders(29))), model.decoder.run_step

    def watched(decoder, state, *inputs):
        with Kernels() as kernels:
            output = step(state, *inputs)
        asked.append(kernels.asked)
        places.append({(key, name): tensor.data_ptr() for key, saved in state.items() for name, tensor in saved.items()
                       if tensor is not None and name in ("cache", "mask", "position", "key", "value")})  # fmt: skip
        return output

    model.decoder.compile_steps()
    model.decoder.compiled.compiled = watched
    near(without_kernels(lambda: steps(model, orders(29), state)), expected)
    assert len(asked) == 29 and set(asked) == {0}
    assert all(place == places[0] for place in places) and len(places[0]) > 6


def test_a_capacity_is_at_least_one_and_never_exceeded(prepared, counters):
    model = prepared("pre")
    with pytest.raises(UsageError, match="must be at least 1 position"):
        model.decoder.compile_steps(0)
    assert model.decoder.compiled is None
    expected = steps(model, orders(5))
    model.decoder.compile_steps(6, **WITHOUT_COMPILER)
    near(steps(model, orders(5)), expected, **ROUNDED)
    with pytest.raises(UsageError, match="more than 6 positions: compile for a larger capacity, or omit it"):
        steps(model, orders(6))


def test_without_a_compiler_steps_are_run_as_they_are(prepared, counters, caplog):
    def missing(graph, inputs):
        raise RuntimeError("no g++ here")

    model = prepared("pre")
    expected = steps(model, orders(5))
    model.decoder.compile_steps(backend=missing)
    with caplog.at_level(logging.WARNING):
        near(steps(model, orders(5)), expected, **ROUNDED)
    assert caplog.text.count("decoding steps are not compiled: ") == 1 and "no g++ here" in caplog.text
