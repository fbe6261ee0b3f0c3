"""Decoding steps in C++ kernels against PyTorch's, and PyTorch's against whole sentences.

Compiled graphs are in ``test_compiled_steps.py``; exported programs, whose caches are inputs and outputs, in
``test_exported_steps.py``; an imitated GPU in ``test_device.py``.
"""

import copy

import pytest
import torch

from fairseq_deep.core.attention import multihead
from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.lstm import NativeLstm
from fairseq_deep.core.native.packed import PacksWeight
from fairseq_deep.core.native.steps import NativeAttention
from tests.helpers.steps import (
    BEAM,
    MODELS,
    PAD,
    SENTENCES,
    STEPS,
    batch,
    near,
    orders,
    steps,
    steps_of_search,
    without_kernels,
)

with_kernels = pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}")
pytestmark = pytest.mark.usefixtures("no_gradients")


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


WAYS = [(name, together, fused, grad) for name in ("pre", "relative positions") for together in (False, True)
        for fused, grad in ((False, False), (True, False), (False, True))]  # fmt: skip
# with a vector for each hypothesis in place of keys and values
VECTORS = ("average attention", "merged attention", "merged average", "SSRU", "Luna")
WAYS += [(name, False, False, grad) for name in VECTORS for grad in (False, True)]


@pytest.mark.parametrize("name, together, fused, grad", WAYS)
@pytest.mark.parametrize("orders", ORDERS)
def test_steps_equal_whole_sentences(name, orders, together, fused, grad, prepared, monkeypatch):
    """With plain products, or fused as on a GPU; "together": keys that all hypotheses of a sentence share.

    Some hypotheses begin with padding, one of which has some later, too. No word sees it; fairseq's positions count it.
    Vectors in place of keys and values do not grow.
    """
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: fused)
    monkeypatch.setattr(library, "enabled", False)
    model, (sentences, orders), state = prepared(name, no_token_positional_embeddings=True), ORDERS[orders], {}
    model.decoder.beam_state.largest_beam = 2 if together else 1
    source, owner = torch.randint(4, 40, (sentences, 7)), torch.arange(sentences).repeat_interleave(2)
    source[-1, :3], target, kept = PAD, torch.zeros(len(owner), 0, dtype=torch.long), []
    with torch.set_grad_enabled(grad):
        shared = model.encoder.reorder_encoder_out(model.encoder(source, None), owner)
        for step, order in enumerate([*orders, None]):
            model.decoder.need_attn = step % 2 == 0 and not model.decoder.packs
            words = torch.randint(4, 40, (len(owner), 1))
            words[target.eq(PAD).all(1) & (torch.arange(len(owner)) < 3 - 2 * step)] = PAD
            words[1] = words[1] if step != 2 else PAD
            target, words = torch.cat([target, words], dim=1), words[:, 0].ne(PAD)
            last, extra = model.decoder(target, encoder_out=shared, incremental_state=state)
            full, weights = model.decoder(target, encoder_out=model.encoder(source[owner], None))
            near(last[words, -1], full[words, -1])
            assert (extra["attn"][0] is None) is not model.decoder.need_attn
            if model.decoder.need_attn:
                near(extra["attn"][0][words, -1], weights["attn"][0][words, -1])
            kept.append([cache["vector"].numel() / len(owner) for cache in state.values() if "vector" in cache])
            for each in order if isinstance(order, tuple) else [order] if order else ():
                order = torch.tensor(each)
                owner, target = owner[order], target[order]
                model.decoder.reorder_incremental_state_scripting(state, order)
                shared = model.encoder.reorder_encoder_out(shared, order)
    assert len(kept[0]) == (2 if name in VECTORS else 0) and all(each == kept[0] for each in kept)


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
def test_keys_that_are_not_finite_harm_no_other_hypothesis(kernels, prepared, monkeypatch):
    """In the second step, a hypothesis has padding: PyTorch goes on with the keys of the kernels."""
    monkeypatch.setattr(library, "enabled", kernels)
    model, script = prepared("pre"), [torch.arange(SENTENCES * BEAM)]
    words, before = batch(model, 2)[1], steps(model, script, padded=[(1, 1)])[1]
    model.decoder.embed_tokens.weight.data[words[0, 0]] = torch.nan
    others = words.ne(words[0, 0]).all(1)
    near(steps(model, script, padded=[(1, 1)])[1][others], before[others])


@with_kernels
def test_steps_without_a_new_order_keep_the_last_one(prepared):
    model = prepared("pre")

    def run():
        encoded, words = batch(model, 4)
        state, scores = model.decoder.start(encoded), []
        for step, order in enumerate((None, [2, 0, 1], None, None)):
            scores.append(state.step(words[::BEAM, step])[0].reshape(SENTENCES, -1))
            if order:
                state.reorder(torch.tensor(order))
        return scores

    near(run(), without_kernels(run))


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
    run = lambda: [*model.decoder.start(model.encoder(source, None)).step(words)]  # noqa: E731
    near(run(), without_kernels(run))
    assert ran == calls * ["attention"]


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
