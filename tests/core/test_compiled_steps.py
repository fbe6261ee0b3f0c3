"""Decoding steps that torch.compile takes whole, over caches of a fixed capacity, against those that are run as is."""

import logging

import pytest
import torch
from fairseq.sequence_generator import EnsembleModel

from fairseq_deep.core.attention import multihead
from fairseq_deep.core.registry import UsageError
from tests.helpers.generation import prepare, strengthen
from tests.helpers.invariances import NEAR
from tests.helpers.methods import METHODS
from tests.helpers.models import PRENORM
from tests.helpers.tensors import Kernels

NO_COMPILER = {"backend": "eager"}  # traces, and runs what it has traced
SENTENCES, BEAM = 3, 4


# all that keep something of hypotheses, or read positions and sources in their own way
CASES = {
    **{case: METHODS[f"decoder_attn-{case}"] for case in ("self", "merged", "average", "ssru", "luna")},
    "dlcl": METHODS["layer_agg-dlcl"],
    "lstm": METHODS["layer_agg-lstm"],
    "transparent": METHODS["decoder_memory-transparent"],
    "relative": (PRENORM, {"relative_positions": 2, "relative_values": True}),
    "learned": (PRENORM, {"decoder_learned_pos": True}),
    "values": (PRENORM, {"value_residual": True}),
}


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


@pytest.fixture
def model_of(build):
    def make(kind, **more):
        name, flags = CASES[kind]
        model = build(name, **flags, **more).eval()
        strengthen(model)
        prepare(model)
        return model

    return make


def orders(steps, seed=1):
    """Of hypotheses within their sentences."""
    generator = torch.Generator().manual_seed(seed)
    first = BEAM * torch.arange(SENTENCES).repeat_interleave(BEAM)
    return [first + torch.randint(BEAM, (SENTENCES * BEAM,), generator=generator) for _ in range(steps)]


@torch.no_grad()
def run(model, steps, new_orders, state=None, padded=()):
    """The scores of all *steps*; before each but the first, an order."""
    generator, ensemble = torch.Generator().manual_seed(2), EnsembleModel([model])
    source = torch.randint(4, 40, (SENTENCES, 7), generator=generator)
    source[1, :2] = model.decoder.padding_idx
    words = torch.randint(4, 40, (SENTENCES * BEAM, steps), generator=generator)
    for row, column in padded:
        words[row, column] = model.decoder.padding_idx
    encoded = ensemble.forward_encoder({"src_tokens": source, "src_lengths": source.ne(1).sum(1)})
    encoded = ensemble.reorder_encoder_out(encoded, torch.arange(SENTENCES).repeat_interleave(BEAM))
    states, scores = [{} if state is None else state], []
    for length, order in zip(range(1, steps + 1), [None, *new_orders]):
        if order is not None:
            ensemble.reorder_incremental_state(states, order)
            encoded = ensemble.reorder_encoder_out(encoded, order)
            words = words[order]
        output = model.decoder(words[:, :length], encoder_out=encoded[0], incremental_state=states[0])
        scores.append(output[0])
    return scores


@pytest.mark.parametrize("kind", CASES)
def test_forty_steps_are_one_graph(kind, model_of, counters):
    """Token for token what the steps are without: no break, no recompilation as hypotheses grow."""
    model, padded = model_of(kind), [(1, 1), (6, 3)]
    expected = run(model, 40, orders(39), padded=padded)
    model.decoder.compile_steps(**NO_COMPILER)
    actual = run(model, 40, orders(39), padded=padded)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want, **NEAR)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_room_is_doubled_with_one_more_graph(model_of, counters):
    """70 positions: room for 64, and then for 128."""
    model, state = model_of("self"), {}
    expected = run(model, 70, orders(69))
    model.decoder.compile_steps(**NO_COMPILER)
    for got, want in zip(run(model, 70, orders(69), state), expected):
        torch.testing.assert_close(got, want, **NEAR)
    assert counters["stats"]["unique_graphs"] == 2
    caches = [saved["cache"] for key, saved in state.items() if key.endswith("target")]
    assert {cache.size(3) for cache in caches} == {128 * BEAM}


@pytest.mark.parametrize("kind", ["relative", "merged"])
def test_sentences_that_end_move_or_are_torn_apart(kind, model_of, counters):
    model = model_of(kind, decoder_layers=1)
    moving = [torch.tensor(order) for order in ([4, 5, 6, 7, 0, 1, 2, 3, 8, 8, 9, 10], [5, 4, 7, 6, 8, 9, 10, 11],
                                                [1, 0, 3, 2, 6, 6, 5, 4], [0, 5, 1, 7], [3, 2, 1, 0])]  # fmt: skip
    expected = run(model, 8, [*orders(2), *moving])
    model.decoder.compile_steps(dynamic=True, **NO_COMPILER)
    for got, want in zip(run(model, 8, [*orders(2), *moving]), expected):
        torch.testing.assert_close(got, want, **NEAR)
    assert not counters["graph_break"]


def fixed(model):
    """A decoder with caches of a fixed capacity, whose steps are run as they are."""
    model.decoder.compile_steps()
    model.decoder.compiled.compiled = model.decoder.compiled.run
    return model


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_step_asks_nothing_and_writes_where_caches_are(fused, model_of, monkeypatch):
    """As a graph of a device wants it."""
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: fused)
    model, state, places, asked = fixed(model_of("self", no_token_positional_embeddings=True)), {}, [], []
    step = model.decoder.run_step

    def watched(decoder, state, *inputs):
        with Kernels() as kernels:
            output = step(state, *inputs)
        asked.append(kernels.asked)
        places.append({(key, name): tensor.data_ptr() for key, saved in state.items() for name, tensor in saved.items()
                       if tensor is not None and name in ("cache", "mask", "position", "key", "value")})  # fmt: skip
        return output

    expected = run(model, 30, orders(29))
    model.decoder.compiled.compiled = watched
    for got, want in zip(run(model, 30, orders(29), state), expected):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(asked) == 29 and set(asked) == {0}
    assert all(place == places[0] for place in places) and len(places[0]) > 6


def test_more_positions_than_the_capacity_are_refused(model_of, counters):
    model = model_of("self")
    expected = run(model, 6, orders(5))
    model.decoder.compile_steps(6, **NO_COMPILER)
    for got, want in zip(run(model, 6, orders(5)), expected):
        torch.testing.assert_close(got, want, **NEAR)
    with pytest.raises(UsageError, match="more than 6 positions: compile for a larger capacity, or omit it"):
        run(model, 7, orders(6))


def test_what_cannot_be_compiled_is_refused(model_of):
    decoder = model_of("self").decoder
    with pytest.raises(UsageError, match="must be at least 1 position"):
        decoder.compile_steps(0)
    assert decoder.compiled is None


def test_without_a_compiler_steps_are_run_as_they_are(model_of, counters, caplog):
    def missing(graph, inputs):
        raise RuntimeError("no g++ here")

    model = model_of("self")
    expected = run(model, 10, orders(9))
    model.decoder.compile_steps(backend=missing)
    with caplog.at_level(logging.WARNING):
        for got, want in zip(run(model, 10, orders(9)), expected):
            torch.testing.assert_close(got, want, **NEAR)
    assert caplog.text.count("decoding steps are not compiled: ") == 1 and "no g++ here" in caplog.text
