"""Sources kept once a sentence, caches in place, reorders: against what is computed from scratch."""

import copy

import pytest
import torch
from torch import nn

from fairseq_deep.core.attention import MultiheadAttention, SharedBeamState
from fairseq_deep.core.attention.beam_reorder import hypotheses_per_sentence, read_order
from fairseq_deep.core.attention.cache import append, select
from tests.helpers.beams import KDIM, NEAR, C, H, S, reorder, with_and_without_grad
from tests.helpers.models import make_batch, reorder_all
from tests.helpers.tensors import DOUBLE, Kernels, randomise


@pytest.mark.parametrize(
    "order, sentences, beam",
    [
        ([0, 0, 0, 1, 1, 1], 2, 3),
        ([0, 1, 2], 3, 1),
        ([0, 0, 0, 0], 1, 4),
        ([0], 1, 1),
        ([0, 1, 0, 1], 2, 1),  # rank by rank
        ([0, 0, 1], 2, 1),
        ([1, 1, 0, 0], 2, 1),
        ([0, 0, 1, 1], 4, 1),  # half of the sentences
        ([0, 0, 1, 1, 2], 2, 1),
        ([], 3, 1),
        ([], 0, 1),
    ],
)
def test_hypotheses_per_sentence(order, sentences, beam):
    assert hypotheses_per_sentence(torch.tensor(order, dtype=torch.long), sentences) == beam
    assert hypotheses_per_sentence(torch.tensor(order, dtype=torch.int32), sentences) == beam


@pytest.mark.parametrize(
    "order, beam, sentences",
    [
        ([0, 1, 2, 3, 4, 5], 2, "all"),
        ([1, 0, 3, 3, 5, 4], 2, "all"),
        ([0, 1, 2], 1, "all"),
        ([0, 1, 2, 3], 2, [0, 1]),
        ([3, 2, 0, 0, 5, 4], 2, [1, 0, 2]),  # sentences change places
        ([0, 1, 2, 3, 4, 5, 0, 1], 2, [0, 1, 2, 0]),
        ([2, 3], 2, [1]),
        ([5, 3, 4], 3, [1]),
        ([0, 1, 4, 3, 2, 5], 2, None),  # torn apart
        ([1, 2, 0, 3], 2, None),
        ([0, 2], 2, None),
        ([0, 1, 2], 2, None),  # half of a group
        ([2, 0, 1], 1, [2, 0, 1]),
        ([2, 0, 0, 1], 1, [2, 0, 0, 1]),
    ],
)
def test_an_order_keeps_sentences_or_tears_them_apart(order, beam, sentences):
    """Of three sentences."""
    for dtype in (torch.long, torch.int32):
        new_order = torch.tensor(order, dtype=dtype)
        read = read_order(new_order, 3, beam)
        assert read.splits_sentences is (sentences is None)
        if sentences == "all":
            assert read.sources is None
        else:  # where they are torn apart, each hypothesis has a source of its own
            split = [number // beam for number in order]
            assert read.sources.tolist() == (split if read.splits_sentences else sentences)
        if sentences == "all" and beam == 1:
            assert read.beam_indices is None
        else:
            assert torch.equal(read.beam_indices, new_order)


@pytest.mark.parametrize("order", [[1, 0, 2, 2, 5, 4], [2, 3], [3, 2, 0, 0, 5, 4], [0, 2, 4]], ids=str)
def test_an_order_is_looked_at_once(order):
    """What encoders and decoders are told comes from one answer, unless the tensor has changed."""
    order = torch.tensor(order)
    with Kernels() as kernels:
        first = read_order(order, 3, 2)
        asked = kernels.asked
        again = read_order(order, 3, 2)
        assert kernels.asked == asked <= 2
        assert again.splits_sentences is first.splits_sentences and (again.sources is None) is (first.sources is None)
        assert read_order(order.clone(), 3, 2).splits_sentences is first.splits_sentences
        assert kernels.asked == 2 * asked
    order.copy_(torch.arange(len(order)).flip(0))
    changed = read_order(order, 3, 2)
    assert changed.splits_sentences is (len(order) % 2 > 0) and changed.sources is not None
    assert read_order(order, 4, 1).sources.tolist() == order.tolist(), "of other sentences"


def keys_and_values(length, batch):
    return torch.randn(2, batch, 3, length, 4)


@with_and_without_grad
def test_a_cache_is_what_was_appended_and_selected(grad):
    """Over many steps and orders, some of which make it smaller or larger, against torch.cat alone."""
    expected, cache, buffer = keys_and_values(0, 6), None, None
    with torch.set_grad_enabled(grad):
        for step in range(100):
            new = keys_and_values(1 + 3 * (step % 7 == 5), expected.size(1))
            cache, buffer = append(cache, buffer, new)
            expected = torch.cat([expected, new], dim=3)
            assert torch.equal(cache, expected)
            if step % 3:
                size = {20: 4, 40: 3, 70: 5}.get(step, cache.size(1))
                order = torch.randint(cache.size(1), (size,))
                cache, buffer = select(cache, buffer, 1, order)
                expected = expected[:, order]
                assert torch.equal(cache, expected)
            assert (buffer is None) is grad
            assert buffer is None or buffer.data_ptr() == cache.data_ptr() and buffer.size(3) >= cache.size(3)


def test_a_cache_can_change_between_recording_gradients_and_not():
    expected, cache, buffer = keys_and_values(0, 2), None, None
    for step in range(60):
        with torch.set_grad_enabled(step % 5 == 0):
            new, order = keys_and_values(1, 2), torch.tensor([1, step % 2])
            cache, buffer = append(cache, buffer, new)
            expected = torch.cat([expected, new], dim=3)
            if step % 3:
                cache, buffer = select(cache, buffer, 1, order)
                expected = expected[:, order]
            assert torch.equal(cache, expected)


@torch.no_grad()
def test_a_cache_grows_in_place():
    """New memory only now and then, and never more than twice what is needed, or 64 positions."""
    cache, buffer, places = None, None, set()
    for _ in range(256):
        cache, buffer = append(cache, buffer, keys_and_values(1, 2))
        assert buffer.size(3) <= max(64, 2 * cache.size(3))
        places.add(buffer.data_ptr())
    assert cache.size(3) == 256 and len(places) <= 4


def test_gradients_pass_through_a_cache():
    """Values of all steps, also of hypotheses that are chosen twice."""
    first, second = (keys_and_values(1, 2).requires_grad_() for _ in range(2))
    cache, buffer = append(None, None, first)
    cache, buffer = append(cache, buffer, second)
    cache, _ = select(cache, buffer, 1, torch.tensor([1, 1]))
    cache.sum().backward()
    for step in (first, second):
        assert step.grad[:, 0].eq(0).all() and step.grad[:, 1].eq(2).all()


def hypotheses(encoder_out):
    """How many hypotheses the output is for, and its sources."""
    count = encoder_out["encoder_out"][0].size(1)
    return (encoder_out["hypotheses"][0].numel() if "hypotheses" in encoder_out else count), count


def assert_is(encoder_out, whole, sentences):
    """Each entry is that of *sentences* in the *whole* output."""
    for name, dim in (("encoder_out", 1), ("encoder_states", 1), ("encoder_padding_mask", 0), ("encoder_embedding", 0),
                      ("src_lengths", 0)):  # fmt: skip
        assert len(encoder_out[name]) == len(whole[name]) > 0
        for got, want in zip(encoder_out[name], whole[name]):
            assert torch.equal(got, want.index_select(dim, torch.tensor(sentences))), name
    assert encoder_out["fc_results"] == encoder_out["src_tokens"] == []


@pytest.fixture
def encoded(build, dictionary):
    source, lengths, _ = make_batch(dictionary)
    encoder = build("transformer_postnorm_2l2l_tiny").encoder.eval()
    with torch.no_grad():
        return encoder, encoder(source, lengths, return_all_hiddens=True)


def test_sources_are_kept_once_a_sentence(encoded):
    encoder, whole = encoded
    out = reorder(encoder, whole, [0, 0, 1, 1, 2, 2])
    assert hypotheses(out) == (6, 3) and "hypotheses" not in whole
    assert_is(out, whole, [0, 1, 2])
    assert all(got is want for got, want in zip(out["encoder_out"], whole["encoder_out"])), "nothing is copied"
    out = reorder(encoder, out, [1, 0, 2, 2, 5, 4])
    assert hypotheses(out) == (6, 3)
    assert_is(out, whole, [0, 1, 2])
    out = reorder(encoder, out, [1, 1, 4, 5])  # the second has ended
    assert hypotheses(out) == (4, 2)
    assert_is(out, whole, [0, 2])
    out = reorder(encoder, out, [3, 2])
    assert hypotheses(out) == (2, 1)
    assert_is(out, whole, [2])


def test_groups_that_are_torn_apart_have_sources_of_their_own(encoded):
    encoder, whole = encoded
    shared = reorder(encoder, whole, [0, 0, 1, 1, 2, 2])
    for order, sentences in (([0, 2, 4], [0, 1, 2]), ([1, 2, 3, 0], [0, 1, 1, 0]), ([5, 0], [2, 0])):
        out = reorder(encoder, shared, order)
        assert hypotheses(out) == (len(order), len(order))
        assert_is(out, whole, sentences)
        again = reorder(encoder, out, list(range(len(order)))[::-1])
        assert hypotheses(again) == (len(order), len(order))
        assert_is(again, whole, sentences[::-1])


def test_orders_without_beams(encoded):
    encoder, whole = encoded
    for order in ([0, 1, 2], [2, 0, 1], [2], [1, 1, 0], [0, 1, 0, 1, 2, 2]):
        out = reorder(encoder, whole, order)
        assert hypotheses(out) == (len(order), len(order))
        assert_is(out, whole, order)
        assert "hypotheses" not in out
    out = reorder(encoder, reorder(encoder, whole, [2, 0, 1]), [0, 0, 1, 1, 2, 2])
    assert hypotheses(out) == (6, 3), "a beam can follow"
    assert_is(out, whole, [2, 0, 1])


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_hypotheses_of_one_source_attend_as_if_each_had_its_own(need_weights):
    """Several positions at once; also every gradient."""
    module = randomise(MultiheadAttention(C, H, kdim=KDIM)).double()
    query, memory = (torch.randn(*shape, requires_grad=True, **DOUBLE) for shape in ((4, 6, C), (S, 2, KDIM)))
    padding, added = torch.zeros(2, S, dtype=torch.bool), torch.randn(4, 6, C, **DOUBLE)
    padding[1, :2] = True
    owner = torch.arange(2).repeat_interleave(3)
    actual = module(query, memory, padding, need_weights=need_weights, added=added)
    expected = module(query, memory[:, owner], padding[owner], need_weights=need_weights, added=added)
    torch.testing.assert_close(actual, expected)
    sources, direction = [query, memory, *module.parameters()], torch.randn_like(query)
    wanted = torch.autograd.grad(expected[0], sources, direction)
    for want, got in zip(wanted, torch.autograd.grad(actual[0], sources, direction)):
        torch.testing.assert_close(got, want)


def test_joined_matrices_are_no_copies():
    module = randomise(MultiheadAttention(C, H))
    weights = [proj.weight.detach().clone() for proj in (module.q_proj, module.k_proj, module.v_proj)]
    module.make_generation_fast_("attention")
    assert torch.equal(module.qkv_proj.weight, torch.cat(weights))
    for proj, weight, part in zip((module.q_proj, module.k_proj, module.v_proj), weights, range(3)):
        assert torch.equal(proj.weight, weight)
        assert proj.weight.data_ptr() == module.qkv_proj.weight[part * C].data_ptr()
        assert proj.bias.data_ptr() == module.qkv_proj.bias[part * C].data_ptr()


# orders of hypotheses, two for each of three sentences, and so on
IN_GROUPS = [[1, 0, 2, 2, 5, 4], [0, 1, 2, 3, 4, 5], [3, 3, 4, 5], [2, 3, 1, 0], [1, 1], [1, 0]]
TORN = [[1, 0, 2, 2, 5, 4], [0, 2, 4, 5, 1, 3], [5, 4, 3, 2, 1, 0], [0, 0, 3], [2, 1, 0]]
ONE_EACH = [[0, 2, 4], [2, 1, 0], [1, 0], [1, 1]]
PAIRED = [[0, 2], [1, 0], [1, 1], [0, 0]]  # of two sentences: what is left is one of each, in order
EVERY = {"groups": (3, IN_GROUPS), "torn": (3, TORN), "one each": (3, ONE_EACH), "paired": (2, PAIRED)}


@pytest.mark.parametrize(
    "kind", ["own", "relative", "values", "together", "together-relative", "together-values", "memory"]
)
@pytest.mark.parametrize("orders", EVERY)
@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
@with_and_without_grad
def test_attention_in_steps_equals_attention_from_scratch(kind, orders, joined, grad):
    """Two hypotheses a sentence at first; after each step a new order. "together": of all hypotheses of a sentence."""
    sentences, orders = EVERY[orders]
    relative = 2 if "relative" in kind or "values" in kind else None
    module = MultiheadAttention(C, H, kdim=KDIM if kind == "memory" else None, causal=True,
                                relative_positions=relative, relative_values="values" in kind)  # fmt: skip
    module = randomise(module).double().eval()
    fast = copy.deepcopy(module)
    if joined:
        fast.make_generation_fast_("attention")
        assert (fast.qkv_proj is None) is (kind == "memory")
    memory = torch.randn(S, sentences, KDIM, **DOUBLE) if kind == "memory" else None
    padding = torch.zeros(sentences, S, dtype=torch.bool)
    padding[-1, -2:] = True
    padding, owner = padding if kind == "memory" else None, torch.arange(sentences).repeat_interleave(2)
    queries, state, beam_state = torch.zeros(0, len(owner), C, **DOUBLE), {}, SharedBeamState()
    beam_state.largest_beam = 2 if "together" in kind else 1
    with torch.set_grad_enabled(grad):
        for order in [*orders, None]:
            new = torch.randn(1, len(owner), C, **DOUBLE)
            queries = torch.cat([queries, new])
            step = beam_state(state, sentences, new, torch.ones(len(owner), 1, dtype=torch.bool))
            need_weights = len(queries) % 2 == 0 and step.mask.size(2) == 1
            output, weights = fast(new, memory, padding, None, state, need_weights, step=step)
            mask = torch.full((len(queries),) * 2, float("-inf"), **DOUBLE).triu(1) if memory is None else None
            whole = (None, None) if memory is None else (memory[:, owner], padding[owner])
            expected, expected_weights = module(queries, *whole, mask, need_weights=True)
            torch.testing.assert_close(output[0], expected[-1], **NEAR)
            assert (weights is None) is not need_weights
            if weights is not None:
                torch.testing.assert_close(weights[:, :, 0], expected_weights[:, :, -1, : weights.size(3)], **NEAR)
            if order is not None:
                order = torch.tensor(order)
                owner, queries = owner[order], queries[:, order]
                reorder_all(nn.ModuleList([fast, beam_state]), state, order)
