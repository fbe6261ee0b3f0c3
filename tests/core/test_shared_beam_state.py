"""Keys and values of all hypotheses of a sentence, kept together: who sees which, and what is copied."""

import pytest
import torch
from torch import nn

from fairseq_deep.core.attention import MultiheadAttention, SharedBeamState
from fairseq_deep.core.attention.beam_reorder import BeamReorder, keep_sources, read_order
from fairseq_deep.core.attention.cache import SourceCache, TargetCache
from fairseq_deep.core.attention.steps import SHORT, by_column, softmax_, takes_rows
from tests.helpers.beams import NEAR, C, H, reorder, with_and_without_grad
from tests.helpers.models import make_batch, reorder_all
from tests.helpers.tensors import DOUBLE, randomise

SCRAMBLED = [[1, 1, 0, 3, 5, 4, 8, 8, 8], [0, 1, 2, 5, 3, 3, 6, 7, 8], [2, 0, 0, 7, 7, 6], [3, 4, 5], [2, 2, 1]]


@pytest.mark.parametrize("torn", [False, True], ids=["", "torn"])
@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
def test_a_hypothesis_sees_its_ancestors_and_no_padding(torn, twice):
    """Three sentences with three hypotheses each; each key is the step and the hypothesis that made it.

    "torn" ends with orders that take sentences apart; "twice" has another order before each.
    """
    state, both = {}, nn.ModuleList([SharedBeamState(), TargetCache()])
    beam_state, cache = both
    ancestors = [[] for _ in range(9)]
    for step, order in enumerate([*SCRAMBLED[:2], [0, 4, 2, 1], [1, 1, 3]] if torn else SCRAMBLED):
        count, padded = len(ancestors), {0, step} if step in (1, 2) else set()
        words = torch.tensor([[row not in padded] for row in range(count)])
        keys = torch.stack([torch.full((count,), step), torch.arange(count)], dim=1).double()
        mask = beam_state(state, 3, torch.zeros(1, count, C, **DOUBLE), words).mask
        beam = 1 if torn and step > 2 else 3
        assert mask.shape == (count // beam, 1, beam, beam * (step + 1))
        held = cache(state, keys.view(1, -1, 1, beam, 2).expand(2, -1, -1, -1, -1))
        ancestors = [[*own, None if row in padded else (step, row)] for row, own in enumerate(ancestors)]
        for row, own in enumerate(ancestors):
            seen = held[0, row // beam, 0][mask[row // beam, 0, row % beam] == 0]
            assert [tuple(key) for key in seen.int().tolist()] == [key for key in own if key is not None]
        orders = [list(range(count))[::-1], order] if twice else [order]
        for order in orders:
            reorder_all(both, state, torch.tensor(order))
            ancestors = [list(ancestors[row]) for row in order]


@torch.no_grad()
def test_a_new_order_copies_no_keys_unless_a_sentence_has_ended():
    state, both = {}, nn.ModuleList([SharedBeamState(), TargetCache()])
    places = []
    for order in ([1, 0, 3, 3], [0, 0, 2, 3], [2, 3], [1, 0]):
        count = 4 if len(places) < 3 else 2
        both[0](state, 2, torch.zeros(1, count, C), torch.ones(count, 1, dtype=torch.bool))
        cache = both[1](state, torch.randn(2, count // 2, H, 2, C // H))
        places.append(cache.data_ptr())
        reorder_all(both, state, torch.tensor(order))
    assert places[0] == places[1] == places[2] != places[3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@with_and_without_grad
def test_a_hypothesis_that_is_not_finite_harms_no_other(value, grad):
    """Beam search drops it, and goes on with the others."""
    module = randomise(MultiheadAttention(C, H, causal=True)).eval()
    queries, outputs = torch.randn(3, 1, 4, C), []
    queries[0, 0, 1] = value
    with torch.set_grad_enabled(grad):
        for together in (True, False):
            beam_state, state = SharedBeamState(), {}
            beam_state.largest_beam = 2 if together else 1
            for query in queries:
                step = beam_state(state, 2, query, torch.ones(4, 1, dtype=torch.bool))
                assert step.mask.size(2) == beam_state.largest_beam
                outputs.append(module(query, incremental_state=state, step=step)[0])
                reorder_all(nn.ModuleList([beam_state, module]), state, torch.tensor([0, 0, 3, 2]))
    for got, want in zip(outputs[:3], outputs[3:]):
        torch.testing.assert_close(got, want, equal_nan=True, **NEAR)


def test_one_hypothesis_a_sentence_or_too_many_have_keys_of_their_own():
    for sentences, count in ((3, 3), (2, 3), (2, 5), (0, 0), (4, 2), (2, 66)):
        beam_state, state = SharedBeamState(), {}
        for length in (1, 2):
            step = beam_state(state, sentences, torch.zeros(1, count, C), torch.ones(count, 1, dtype=torch.bool))
            assert step.mask.shape == (count, 1, 1, length) and step.mask.eq(0).all()
            reorder_all(beam_state, state, torch.arange(count))


@torch.no_grad()
def test_padding_in_a_step_is_seen_by_no_later_one(build, dictionary):
    """As if each hypothesis had a source of its own."""
    source, lengths, _ = make_batch(dictionary)
    model = build("transformer_postnorm_2l2l_tiny").eval()
    target, outputs = torch.randint(4, 40, (6, 5)), []
    target[[1, 4], [2, 1]] = dictionary.pad()
    for shares in (True, False):
        model.encoder.shares_sources, words, state = shares, target, {}
        out = reorder(model.encoder, model.encoder(source, lengths), [0, 0, 1, 1, 2, 2])
        for step in range(1, 6):
            outputs.append(model.decoder(words[:, :step], encoder_out=out, incremental_state=state)[0])
            order = torch.tensor([1, 0, 2, 3, 4, 4])
            model.decoder.reorder_incremental_state_scripting(state, order)
            out, words = model.encoder.reorder_encoder_out(out, order), words[order]
    together, alone = outputs[:5], outputs[5:]
    for got, want in zip(together, alone):
        torch.testing.assert_close(got, want, **NEAR)


@torch.no_grad()
def test_keys_of_sources_keep_their_layout_as_sentences_leave():
    """By column, as the products of a step on a CPU want them; a copy at each step would cost more than it gains."""
    key, value = by_column(torch.randn(3, H, 5, 4)), torch.randn(3, H, 5, 4)
    assert key.transpose(2, 3).is_contiguous()
    cache, state, before = SourceCache(), {}, key.clone()
    cache.keep(state, key, value, None)
    cache.reorder(state, BeamReorder(None, torch.tensor([2, 0]), None, False))
    kept, values, _ = cache(state)
    assert torch.equal(kept, before[[2, 0]]) and torch.equal(values, value[[2, 0]])
    assert kept.transpose(2, 3).is_contiguous()


KEPT = {  # of six sentences: which stay, in which order, and how many are moved where they are
    "the last ones leave": ([0, 1, 2, 3], 0),
    "one leaves": ([0, 5, 2, 3, 4], 1),
    "two leave": ([0, 5, 2, 4], 2),
    "all stay": ([0, 1, 2, 3, 4, 5], None),
    "closed up": ([0, 2, 3, 4, 5], None),
    "turned round": ([2, 1, 0], None),
    "most are others": ([5, 4, 3], None),
    "one twice": ([0, 1, 1, 3], None),
    "more than before": ([0, 1, 2, 3, 4, 5, 5], None),
}


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kept, moves", KEPT.values(), ids=KEPT)
def test_sentences_that_take_places_of_others_are_moved_there(kept, moves, beam):
    ranks = torch.randint(beam, (len(kept), beam))
    order = read_order((torch.tensor(kept).unsqueeze(1) * beam + ranks).flatten(), 6, beam)
    assert (order.moves if moves is None else len(order.moves)) == moves
    for dim in (0, 1):
        x = torch.randn(6, 6, 2)
        want = x.index_select(dim, torch.tensor(kept))
        gradient = keep_sources(x.clone().requires_grad_(), dim, order)
        assert torch.equal(gradient, want)
        with torch.no_grad():
            got = keep_sources(x, dim, order)
        assert torch.equal(got, want)
        assert (got.data_ptr() == x.data_ptr()) == (moves is not None or order.sources is None)


@torch.no_grad()
def test_caches_move_the_sentences_that_take_places_of_others():
    state, parts = {}, nn.ModuleList([SharedBeamState(), TargetCache(), SourceCache()])
    parts[0](state, 3, torch.zeros(1, 6, C), torch.ones(6, 1, dtype=torch.bool))
    own, key, value = parts[1](state, torch.randn(2, 3, H, 2, 4)), by_column(torch.randn(3, H, 5, 4)), torch.randn(3, 5)
    parts[2].keep(state, key, value, None)
    wanted = [own[:, [0, 2]], key[[0, 2]], value[[0, 2]]]  # copies
    reorder_all(parts, state, torch.tensor([1, 0, 4, 5]))
    held = [state[parts[1]._state]["cache"], *parts[2](state)[:2]]
    for got, want, before in zip(held, wanted, (own, key, value)):
        assert torch.equal(got, want) and got.data_ptr() == before.data_ptr()
    longer = parts[1](state, torch.randn(2, 2, H, 2, 4))
    assert torch.equal(longer[:, :, :, :2], wanted[0]) and longer.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("entries", [1, SHORT - 1, SHORT, 40])
@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("scale", [1, 1e4])  # exp of the second is beyond fp32
def test_softmax_of_short_rows(rows, entries, scale):
    scores = scale * torch.randn(rows, entries)
    scores[0, : entries // 2] = -float("inf")
    scores[1] = float("nan")
    want = torch.softmax(scores, dim=-1)
    torch.testing.assert_close(softmax_(scores.clone()), want, equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_without_gradients_is_one_with_them(masked, autocast):
    """Attention to a source has a short way on a CPU; a mask and autocast are none of its business."""
    module = randomise(MultiheadAttention(C, H, kdim=C)).eval()
    query, memory = torch.randn(1, 6, C), torch.randn(5, 2, C)
    mask = torch.zeros(3, 5).masked_fill_(torch.rand(3, 5) < 0.5, -1e4) if masked else None
    outputs = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs.append(module(query, memory, attn_mask=mask, incremental_state={})[0].float())
            assert takes_rows(module, query, memory, None) == (not grad and not autocast)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_copies_of_one_hypothesis_share_its_sentence():
    """As after the first step of a search, which has one hypothesis per sentence."""
    shared, state = SharedBeamState(), {}
    with torch.no_grad():
        shared(state, 2, torch.zeros(1, 2, 4), torch.ones(2, 1, dtype=torch.bool))
        order = shared.reorder(state, torch.tensor([0, 0, 0, 1, 1, 1]))
        step = shared(state, 2, torch.zeros(1, 6, 4), torch.ones(6, 1, dtype=torch.bool))
    assert order.copies == 3 and order.sources is None
    assert step.mask.shape == (2, 1, 3, 2 * 3), "three hypotheses see the keys of their sentence"
