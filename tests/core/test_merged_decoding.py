"""Decoding with every --decoder-attn: caches, beams that scramble and shrink, causality, padding, sizes of states."""

import itertools

import pytest
import torch

from tests.helpers.decoder_attention import (
    COMBINATIONS,
    both_contexts_of_decoders,
    every_combination,
    every_decoder,
    make_model,
)
from tests.helpers.invariances import NEAR
from tests.helpers.models import make_batch

# models of fp64; in steps, their softmax is of fp32: NEAR
EXACTLY = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture
def model_of(build):
    """model_of(kind, stack, **flags): a narrow model with random parameters, in fp64, for translating."""
    return lambda *names, **flags: make_model(build, *names, **flags).eval()


def scores(model, target, encoder_out, **options):
    return model.decoder(target, encoder_out=encoder_out, **options)[0]


@every_decoder
@torch.no_grad()
def test_incremental_equals_full(kind, stack, model_of, dictionary):
    model = model_of(kind, stack)
    source, lengths, target = make_batch(dictionary, target_lengths=(9, 7, 2))
    encoder_out, state = model.encoder(source, lengths), {}
    full = scores(model, target, encoder_out)
    for step in range(1, 10):
        last = scores(model, target[:, :step], encoder_out, incremental_state=state)
        words = target[:, step - 1].ne(dictionary.pad())
        torch.testing.assert_close(last[words, -1], full[words, step - 1], **NEAR)


# what beam search asks for, with two hypotheses a sentence: scrambled, a sentence has ended, another one
SHRINKING = ([1, 0, 2, 2, 5, 4], [3, 3, 4, 5], [0, 1, 3, 2], [3, 2])


@every_decoder
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_a_scrambled_and_shrinking_beam_equals_recomputation(kind, stack, grad, model_of, dictionary):
    model = model_of(kind, stack)
    source, lengths, _ = make_batch(dictionary)
    order = torch.arange(3).repeat_interleave(2)
    with torch.set_grad_enabled(grad):
        encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), order)
        source, lengths, state = source[order], lengths[order], {}
        target = torch.full((6, 1), dictionary.eos())
        for order in (*SHRINKING, None):
            last = scores(model, target, encoder_out, incremental_state=state)[:, -1]
            expected = scores(model, target, model.encoder(source, lengths))[:, -1]
            torch.testing.assert_close(last, expected, **NEAR)
            if order is None:
                break
            order = torch.tensor(order)
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            words = torch.randint(dictionary.nspecial, len(dictionary), (len(order), 1))
            source, lengths, target = source[order], lengths[order], torch.cat([target[order], words], dim=1)


@both_contexts_of_decoders
@torch.no_grad()
def test_a_later_word_changes_nothing_earlier(kind, stack, full_context, model_of, dictionary):
    """Except where the full context is asked for, where it changes everything."""
    model = model_of(kind, stack)
    source, lengths, target = make_batch(dictionary, target_lengths=(6, 6, 6))
    encoder_out = model.encoder(source, lengths)
    before = scores(model, target, encoder_out, full_context_alignment=full_context)
    target[:, 3] = dictionary.nspecial + (target[:, 3] - dictionary.nspecial + 1) % (len(dictionary) - 4)
    changed = (scores(model, target, encoder_out, full_context_alignment=full_context) != before).any(-1)
    assert changed[:, 3:].all()
    assert changed[:, :3].all() if full_context else not changed[:, :3].any()


@both_contexts_of_decoders
@torch.no_grad()
def test_padding_of_either_side_changes_nothing(kind, stack, full_context, model_of, dictionary):
    model, pad = model_of(kind, stack), dictionary.pad()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))

    def run(source, target):
        return scores(model, target, model.encoder(source, lengths), full_context_alignment=full_context)

    alone, padding = run(source, target), torch.full((2, 3), pad)
    for shifted in (source, torch.cat([padding, source], dim=1), torch.cat([source, padding], dim=1)):
        torch.testing.assert_close(run(shifted, torch.cat([target, padding], dim=1))[:, :6], alone, **EXACTLY)
        torch.testing.assert_close(run(shifted, torch.cat([padding, target], dim=1))[:, 3:], alone, **EXACTLY)
    mixed = torch.stack([torch.cat([target[0], padding[0]]), torch.cat([padding[1], target[1]])])
    together = run(source, mixed)
    torch.testing.assert_close(together[0, :6], alone[0], **EXACTLY)
    torch.testing.assert_close(together[1, 3:], alone[1], **EXACTLY)


@pytest.mark.parametrize("kind, stack", [("luna", "postnorm"), *itertools.product(
    ["average", "merged", "merged-average", "ssru"], ["postnorm", "prenorm", "lstm"])])  # fmt: skip
@torch.no_grad()
def test_left_padding_in_steps(kind, stack, model_of, dictionary):
    """Padding in front is not counted. (fairseq's positions do count it in steps, so that there are none here.)"""
    model, pad = model_of(kind, stack, no_token_positional_embeddings=True), dictionary.pad()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    target[0] = torch.cat([torch.full((2,), pad), target[0, :4]])
    encoder_out, state = model.encoder(source, lengths), {}
    full = scores(model, target, encoder_out)
    for step in range(1, 7):
        last = scores(model, target[:, :step], encoder_out, incremental_state=state)
        words = target[:, step - 1].ne(pad)
        torch.testing.assert_close(last[words, -1], full[words, step - 1], **NEAR)


def numbers(state, kind, names):
    """Entries that caches of *kind* hold under *names*."""
    saved = [cache[name] for key, cache in state.items() if key.endswith(kind) for name in names]
    return sum(tensor.numel() for tensor in saved if tensor is not None)


VECTORS = [(name, ("vector",)) for name in ("running_sum", "recurrent_state")]
HELD = (*VECTORS, ("beam_state", ("count",)), ("target", ("cache",)), ("source", ("key", "value", "bias")))


@pytest.mark.parametrize("kind, stack", [pair for pair in COMBINATIONS if pair[1] in ("postnorm", "lstm")])
@torch.no_grad()
def test_the_state_without_self_attention_does_not_grow(kind, stack, model_of, dictionary):
    """C numbers for each hypothesis and layer, for means one count of its words; keys and values if it attends."""
    model = model_of(kind, stack)
    source, lengths, target = make_batch(dictionary, target_lengths=(40, 40, 40))
    encoder_out, state, sizes = model.encoder(source, lengths), {}, []
    for step in range(1, 41):
        scores(model, target[:, :step], encoder_out, incremental_state=state)
        sizes.append([numbers(state, *held) for held in HELD])
    averages = "self" not in kind and kind != "ssru"
    assert {size[0] for size in sizes} == {3 * 3 * 16 if averages else 0}
    assert {size[1] for size in sizes} == {3 * 3 * 16 if kind == "ssru" else 0}
    assert {size[2] for size in sizes} == {3 if averages else 0}
    assert {size[4] for size in sizes} == {3 * 2 * source.numel() * 16 + 3 * source.numel()}
    grows = 3 * 3 * 2 * 16 if "self" in kind else 0
    assert [size[3] for size in sizes] == [grows * step for step in range(1, 41)]


@pytest.mark.parametrize("kind", ["merged", "merged-self", "merged-average", "average"])
@torch.no_grad()
def test_the_source_is_projected_once(kind, model_of, dictionary):
    """Values of the target in merged attention pass through the same matrix at each step."""
    model, lengths = model_of(kind, "postnorm"), []
    source, _, target = make_batch(dictionary, lengths=(5, 7), target_lengths=(4, 4))
    attention, calls = model.decoder.layers[1].encoder_attn, {"k": [], "v": []}
    for name, seen in calls.items():
        hook = lambda _, args, output, seen=seen: seen.append(tuple(args[0].shape[:2]))  # noqa: E731
        getattr(attention, f"{name}_proj").register_forward_hook(hook)
    order = torch.arange(2).repeat_interleave(4)
    encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), order)
    state = {}
    for step in range(1, 5):
        scores(model, target[order, :step], encoder_out, incremental_state=state)
    assert calls["k"] == [(7, 2)], "of the two sentences, not of their eight hypotheses"
    steps = [(1, 8)] * 4 if kind == "merged" else []
    assert sorted(calls["v"]) == sorted([(7, 2), *steps])


@every_combination
@torch.no_grad()
def test_alignments_are_the_weights_of_the_attention_to_the_source(kind, stack, model_of, dictionary):
    model = model_of(kind, stack)
    model.decoder.need_attn = True
    source, lengths, target = make_batch(dictionary, target_lengths=(6, 6, 6))
    encoder_out = model.encoder(source, lengths)
    out, extra = model.decoder(target, encoder_out=encoder_out)
    attn, pad = extra["attn"][0], source.eq(dictionary.pad())
    assert attn.shape == (3, 6, 7)
    torch.testing.assert_close(attn.sum(-1), torch.ones_like(attn[..., 0]))
    assert attn.masked_select(pad.unsqueeze(1)).eq(0).all()
    captured, first = [], model.decoder.layers[0].encoder_attn
    hook = first.register_forward_hook(lambda _, args, output: captured.append(output[1]))
    head = model.decoder(target, encoder_out=encoder_out, alignment_layer=0, alignment_heads=1)[1]["attn"][0]
    hook.remove()
    torch.testing.assert_close(head, captured[0][0].to(head))
    assert not torch.allclose(head, attn)
    model.decoder.need_attn = False
    assert model.decoder(target, encoder_out=encoder_out)[1]["attn"][0] is not None, "a scorer wants them all the same"
    quick, extra = model.decoder(target[:, :1], encoder_out=encoder_out, incremental_state={})
    assert extra["attn"][0] is None
    torch.testing.assert_close(quick, out[:, :1], rtol=1e-4, atol=1e-5)
