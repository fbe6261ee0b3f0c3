"""Decoding steps in C++ kernels and in compiled graphs against PyTorch's: one table of models, one script of a search.

Exported programs, whose caches are inputs and outputs, are in ``test_exported_steps.py``; an imitated GPU is in
``test_device.py``.
"""

import copy
import logging

import pytest
import torch

from fairseq_deep.core.attention import multihead
from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.lstm import NativeLstm
from fairseq_deep.core.native.packed import PacksWeight
from fairseq_deep.core.native.steps import NativeAttention
from fairseq_deep.core.registry import UsageError
from tests.helpers.generation import near, prepared_model, without_kernels
from tests.helpers.tensors import Kernels

LSTM, PRE, POST = "transformer_lstm_6l", "transformer_prenorm_6l", "transformer_postnorm_6l"
SENTENCES, BEAM, PAD, STEPS = 3, 3, 1, 12
ROUNDED = {"rtol": 1e-4, "atol": 1e-4}
WITHOUT_COMPILER = {"backend": "eager"}  # traces, and runs what it has traced

# architecture, flags, and what kernels run in a step of two layers: all of it, all layers one by one, attentions and
# LSTM, or a number of attentions, around which PyTorch runs the layers
MODELS = {
    "pre": (PRE, {}, "all"),
    "post": (POST, {}, "all"),
    "rms": (PRE, {"norm": "rms"}, "all"),
    "kv heads": (PRE, {"decoder_kv_heads": 2}, "all"),
    "swish": (PRE, {"activation_fn": "swish"}, "all"),
    "rotary positions": (PRE, {"rotary_positions": True, "decoder_kv_heads": 2}, "all"),
    "learned positions": (PRE, {"decoder_learned_pos": True}, "all"),
    "modern": ("transformer_modern_6l", {}, "all"),
    "factor": (PRE, {"residual": "completep"}, "all"),
    "modern post-norm": (POST, {"ffn": "swiglu", "rotary_positions": True}, "all"),
    "no norms": (POST, {"deep_init": "tfixup"}, "all"),
    "language model": (PRE, {"no_cross_attention": True}, "all"),
    "sums between layers": ("transformer_dlcl_6l", {}, "layers"),
    "a memory per layer": (PRE, {"decoder_memory": "transparent"}, "all"),
    "other layers": (PRE, {"activation_fn": "gelu", "rotary_positions": True}, 4),
    "relative positions": (PRE, {"relative_positions": 2, "relative_values": True}, 2),
    "value residual": (PRE, {"value_residual": True}, 0),
    "average attention": (PRE, {"decoder_attn": "average"}, 2),
    "SSRU": (PRE, {"decoder_attn": "ssru"}, 2),
    "merged attention": (POST, {"decoder_attn": "merged"}, 2),
    "merged self-attention": (PRE, {"decoder_attn": "merged-self"}, 4),
    "merged average": (PRE, {"decoder_attn": "merged-average"}, 2),
    "Luna": (POST, {"encoder_attn": "luna", "decoder_attn": "luna"}, 0),
    "LSTM": (LSTM, {}, "lstm"),
    "LSTM of both attentions": (LSTM, {"lstm_merge": "concat"}, "lstm"),
    "LSTM with biases": (LSTM, {"lstm_biases": True}, "lstm"),
    "languages": (PRE, {"language_norm": True, "language_transform": True}, 4),
}
COMPILED = ("pre", "learned positions", "sums between layers", "a memory per layer", "relative positions",
            "value residual", "average attention", "SSRU", "merged attention", "Luna", "LSTM", "languages")  # fmt: skip
with_kernels = pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}")


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def prepared(dictionary):
    """prepared(name, **flags): a model of the table, ready for decoding."""

    def make(name, **more):
        arch, flags = MODELS[name][:2]
        return prepared_model(arch, dictionary, **{**flags, **more})

    return make


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


def orders(count, leave=()):
    """New orders of hypotheses within their sentences; at the steps *leave*, the second sentence has ended."""
    draws, sentences = torch.Generator().manual_seed(1), SENTENCES
    for step in range(count):
        kept = torch.arange(sentences) if step not in leave else torch.tensor([0, 2])
        sentences = len(kept)
        yield (kept.unsqueeze(1) * BEAM + torch.randint(BEAM, (sentences, BEAM), generator=draws)).flatten()


def batch(model, count):
    """An encoded batch with padding, and *count* words of each hypothesis."""
    draws = torch.Generator().manual_seed(2)
    source = torch.randint(4, 40, (SENTENCES, 21), generator=draws)
    source[0, :4], source[2, :9] = PAD, PAD
    source[1, 0], source[2, 9] = 30, 35  # tags, if the model knows languages
    words = torch.randint(4, 30, (SENTENCES * BEAM, count), generator=draws)
    return model.encoder(source, source.ne(PAD).sum(1)), words


def steps(model, new_orders, state=None, padded=()):
    """The scores of a step before each order and one at the end, as fairseq's search asks; words are *padded*."""
    new_orders, scores, state = [*new_orders, None], [], {} if state is None else state
    encoded, words = batch(model, len(new_orders))
    encoded = model.encoder.reorder_encoder_out(encoded, torch.arange(SENTENCES).repeat_interleave(BEAM))
    for row, column in padded:
        words[row, column] = PAD
    for length, order in enumerate(new_orders, start=1):
        scores.append(model.decoder(words[:, :length], encoder_out=encoded, incremental_state=state)[0])
        if order is not None:
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded, words = model.encoder.reorder_encoder_out(encoded, order), words[order]
    return scores


def steps_of_search(model, new_orders, one_by_one=False):
    """The scores of :func:`steps`, as the search of this package asks.

    With *one_by_one*, the first step has one hypothesis per sentence.
    """
    new_orders, scores = [*new_orders, None], []
    encoded, words = batch(model, len(new_orders))
    state = model.decoder.start(encoded, BEAM)
    for step, order in enumerate(new_orders):
        alone = one_by_one and step == 0
        logits, _, normalisers = state.step(words[:: BEAM if alone else 1, step])
        if normalisers is not None:
            torch.testing.assert_close(normalisers, logits.logsumexp(1))
        scores.append(logits.unsqueeze(1))
        if order is not None:
            state.reorder(order // BEAM if alone else order)
            words = words[order]
    return scores


# --- PyTorch ---

# orders of hypotheses: at first, there are two for each of three or two sentences
ORDERS = {
    "groups": (3, [[1, 0, 2, 2, 5, 4], [0, 1, 2, 3, 4, 5], [3, 3, 4, 5], [2, 3, 1, 0], [1, 1], [1, 0]]),
    "split": (3, [[1, 0, 2, 2, 5, 4], [0, 2, 4, 5, 1, 3], [5, 4, 3, 2, 1, 0], [0, 0, 3], [2, 1, 0]]),
    "one each": (3, [[0, 2, 4], [2, 1, 0], [1, 0], [1, 1]]),
    "paired": (2, [[0, 2], [1, 0], [1, 1], [0, 0]]),  # what is left is one of each, in order
    "two at once": (3, [([5, 4, 3, 2, 1, 0], [1, 0, 2, 2, 5, 4]), ([1, 1, 2, 3, 4, 4], [2, 3, 0, 1]),
                        ([3, 0, 2, 1], [1, 0])]),
}


@pytest.mark.parametrize("name", ["pre", "relative positions"])
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("together", [False, True], ids=["", "together"])
@pytest.mark.parametrize("fused, grad", [(False, False), (True, False), (False, True)], ids=["", "fused", "grad"])
def test_steps_equal_whole_sentences(name, orders, together, fused, grad, prepared, monkeypatch):
    """With plain products, or fused as on a GPU; "together": keys that all hypotheses of a sentence share.

    Some hypotheses begin with padding, which no word sees; fairseq's positions would count it.
    """
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: fused)
    monkeypatch.setattr(library, "enabled", False)
    model, (sentences, orders), state = prepared(name, no_token_positional_embeddings=True), ORDERS[orders], {}
    model.decoder.beam_state.largest_beam = 2 if together else 1
    source, owner = torch.randint(4, 40, (sentences, 7)), torch.arange(sentences).repeat_interleave(2)
    source[-1, :3], target = PAD, torch.zeros(len(owner), 0, dtype=torch.long)
    with torch.set_grad_enabled(grad):
        shared = model.encoder.reorder_encoder_out(model.encoder(source, None), owner)
        for step, order in enumerate([*orders, None]):
            model.decoder.need_attn = step % 2 == 0
            words = torch.randint(4, 40, (len(owner), 1))
            words[target.eq(PAD).all(1) & (torch.arange(len(owner)) < 3 - 2 * step)] = PAD
            target, words = torch.cat([target, words], dim=1), words[:, 0].ne(PAD)
            last, extra = model.decoder(target, encoder_out=shared, incremental_state=state)
            full, weights = model.decoder(target, encoder_out=model.encoder(source[owner], None))
            near(last[words, -1], full[words, -1])
            assert (extra["attn"][0] is None) is not model.decoder.need_attn
            if model.decoder.need_attn:
                near(extra["attn"][0][words, -1], weights["attn"][0][words, -1])
            for each in order if isinstance(order, tuple) else [order] if order else ():
                order = torch.tensor(each)
                owner, target = owner[order], target[order]
                model.decoder.reorder_incremental_state_scripting(state, order)
                shared = model.encoder.reorder_encoder_out(shared, order)


# --- kernels ---


def watch(monkeypatch):
    """The calls of kernels for attentions and LSTM, and of those of the library for layers and decoders."""
    ran = []
    for name, kind in (("attention", NativeAttention), ("lstm", NativeLstm)):
        run = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda *args, name=name, run=run: ran.append(name) or run(*args))
    for name in ("decoder_layer_step", "decoder_step"):
        function = getattr(load(), name)
        monkeypatch.setattr(load(), name, lambda *args, name=name, run=function: ran.append(name) or run(*args))
    return ran


@with_kernels
@pytest.mark.parametrize("name, threads", [*((name, 1) for name in MODELS),
                                           *((name, 2) for name in ("pre", "modern", "sums between layers", "LSTM"))])
def test_kernels_compute_the_steps_of_torch(name, threads, prepared, monkeypatch):
    """Several hypotheses per sentence, new orders, a sentence that ends; also of a copy of the model."""
    kernels, ran = MODELS[name][2], watch(monkeypatch)
    model, before = prepared(name), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        script = list(orders(STEPS - 1, leave=[4]))
        expected = without_kernels(lambda: steps(model, script))
        assert not ran
        near(steps_of_search(model, script), expected)
        whole = {"all": ["decoder_step"], "layers": 2 * ["decoder_layer_step"],
                 "lstm": 2 * ["attention", "attention", "lstm"]}  # fmt: skip
        assert ran == STEPS * (whole[kernels] if kernels in whole else kernels * ["attention"])
        near(steps_of_search(copy.deepcopy(model), script), expected)
        near(steps(model, script), expected)
    finally:
        torch.set_num_threads(before)


@with_kernels
@pytest.mark.parametrize("name", ["pre", "modern", "sums between layers", "LSTM with biases"])
def test_kernels_in_int8_are_those_of_their_parts(name, prepared):
    """A layer with a hook is left to PyTorch, which rounds a little otherwise."""
    model, script = prepared(name, encoder_layers=2), list(orders(STEPS - 1))
    exact = steps_of_search(model, script)
    counts, packed = decode_in(model, "int8"), [part for part in model.modules() if isinstance(part, PacksWeight)]
    assert min(counts[:2]) > 5 and counts[2] == "int8" and all(part.in_int8 for part in packed)
    found = steps_of_search(model, script)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.register_forward_hook(lambda *_: None)
    for ours, parts, fp32 in zip(found, steps_of_search(model, script), exact):
        assert (ours - parts).abs().mean() < 0.01 * fp32.std()
        assert 0.001 * fp32.std() < (ours - fp32).abs().mean() < 0.1 * fp32.std()


@with_kernels
@pytest.mark.parametrize("name", ["pre", "sums between layers", "rotary positions", "LSTM"])
def test_a_search_begins_with_one_hypothesis_per_sentence(name, prepared):
    """More steps than the caches have room for at first; an order may repeat a hypothesis."""
    model = prepared(name)
    script = [torch.arange(SENTENCES).repeat_interleave(BEAM) * BEAM, *orders(69, leave=[3])]
    near(steps_of_search(model, script, one_by_one=True)[1:], without_kernels(lambda: steps(model, script))[1:])


@pytest.mark.parametrize("kernels", [True, False])
def test_a_first_token_must_be_in_the_dictionary(kernels, prepared, monkeypatch):
    monkeypatch.setattr(library, "enabled", kernels)
    model = prepared("pre")
    state = model.decoder.start(model.encoder(torch.tensor([[5, 6, 2]]), None))
    with pytest.raises(IndexError):
        state.step(torch.tensor([model.decoder.embed_tokens.num_embeddings]))


@with_kernels
@pytest.mark.parametrize("name, calls", [("pre", 3), ("other layers", 3)])
def test_the_attention_of_the_alignment_is_left_to_torch(name, calls, prepared, monkeypatch):
    """One of the four attentions of two layers."""
    model, ran = prepared(name), watch(monkeypatch)
    model.decoder.make_generation_fast_(need_attn=True)
    source, words = torch.randint(4, 40, (2, 7)), torch.full((2,), 5)
    run = lambda: [*model.decoder.start(model.encoder(source, None)).step(words)[:2]]  # noqa: E731
    near(run(), without_kernels(run))
    assert ran == calls * ["attention"]


@with_kernels
@pytest.mark.parametrize("name", ["pre", "LSTM"])
def test_new_weights_are_those_that_the_next_search_uses(name, prepared):
    model, other, script = prepared(name), prepared(name), list(orders(2))
    weights = {key: value + 0.1 * torch.randn_like(value) for key, value in model.state_dict().items()}
    other.load_state_dict(weights)
    assert not torch.allclose(steps_of_search(model, script)[0], steps_of_search(other, script)[0])
    model.load_state_dict(weights)
    near(steps_of_search(model, script), without_kernels(lambda: steps(other, script)))


@with_kernels
def test_hooks_of_layers_run_in_decoding_steps(prepared):
    model, script, seen = prepared("pre"), list(orders(STEPS - 1)), []
    expected = steps_of_search(model, script)
    hook = model.decoder.layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(output[0].shape))
    near(steps_of_search(model, script), expected)
    assert len(seen) == STEPS
    hook.remove()
    near(steps_of_search(model, script), expected)
    assert len(seen) == STEPS


# --- compiled steps, over caches of a fixed capacity ---


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
