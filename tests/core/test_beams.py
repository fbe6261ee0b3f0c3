"""State of beam search: sources once per sentence, caches in place, shared keys, reordering; against recomputation."""

import copy

import pytest
import torch
from torch import nn

from fairseq_deep.core.attention import MultiheadAttention, SharedBeamState, multihead
from fairseq_deep.core.attention.beam_reorder import keep_sources, read_order
from fairseq_deep.core.attention.cache import TargetCache, append, select
from fairseq_deep.core.stack import Stack
from tests.helpers.models import reorder_all
from tests.helpers.tensors import DOUBLE, randomise

C, H, KDIM, S = 8, 2, 6, 5
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # in steps, softmax is of fp32
with_and_without_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


def keys_and_values(length, batch):
    return torch.randn(2, batch, 3, length, 4)


@pytest.mark.parametrize("grad", [False, True, "now and then"], ids=str)
def test_a_cache_is_what_was_appended_and_selected(grad):
    """Over many steps and orders, some of which make it smaller or larger, against torch.cat."""
    expected, cache, buffer = keys_and_values(0, 6), None, None
    for step in range(100):
        records = grad is True or bool(grad) and step % 5 == 0
        with torch.set_grad_enabled(records):
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
        assert buffer is None if records else buffer is not None or grad
        assert buffer is None or buffer.data_ptr() == cache.data_ptr() and buffer.size(3) >= cache.size(3)


# orders of hypotheses, two for each of three sentences, and so on
IN_GROUPS = [[1, 0, 2, 2, 5, 4], [0, 1, 2, 3, 4, 5], [3, 3, 4, 5], [2, 3, 1, 0], [1, 1], [1, 0]]
SPLIT = [[1, 0, 2, 2, 5, 4], [0, 2, 4, 5, 1, 3], [5, 4, 3, 2, 1, 0], [0, 0, 3], [2, 1, 0]]
ONE_EACH = [[0, 2, 4], [2, 1, 0], [1, 0], [1, 1]]
PAIRED = [[0, 2], [1, 0], [1, 1], [0, 0]]  # of two sentences: what is left is one of each, in order
EVERY = {"groups": (3, IN_GROUPS), "split": (3, SPLIT), "one each": (3, ONE_EACH), "paired": (2, PAIRED)}


@pytest.mark.parametrize(
    "kind", ["own", "relative", "values", "together", "together-relative", "together-values", "memory"]
)
@pytest.mark.parametrize("orders", EVERY)
@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@with_and_without_grad
def test_attention_in_steps_equals_attention_from_scratch(kind, orders, joined, fused, grad, monkeypatch):
    """Two hypotheses per sentence at first; after each step a new order; with plain products, or fused as on a GPU.

    "together": with keys that all hypotheses of a sentence share. Joined in fp32, which a CPU has shorter steps for.
    """
    real = {"dtype": torch.float32 if joined else torch.float64}
    monkeypatch.setattr(multihead, "fuses_steps", lambda q: fused)
    sentences, orders = EVERY[orders]
    relative = 2 if "relative" in kind or "values" in kind else None
    stack = Stack(1, C, heads=H, relative_positions=relative, relative_values="values" in kind)
    module = MultiheadAttention(stack, KDIM if kind == "memory" else None, causal=True)
    module = randomise(module).to(**real).eval()
    fast = copy.deepcopy(module)
    if joined:
        fast.make_generation_fast_()
        assert (fast.qkv_proj is None) is (kind == "memory")
    memory = torch.randn(S, sentences, KDIM, **real) if kind == "memory" else None
    padding = torch.zeros(sentences, S, dtype=torch.bool)
    padding[-1, -2:] = True
    padding, owner = padding if kind == "memory" else None, torch.arange(sentences).repeat_interleave(2)
    queries, state, beam_state = torch.zeros(0, len(owner), C, **real), {}, SharedBeamState()
    beam_state.largest_beam = 2 if "together" in kind else 1
    with torch.set_grad_enabled(grad):
        for order in [*orders, None]:
            new = torch.randn(1, len(owner), C, **real)
            queries = torch.cat([queries, new])
            step = beam_state(state, sentences, new, torch.ones(len(owner), 1, dtype=torch.bool))
            need_weights = len(queries) % 2 == 0 and step.mask.size(2) == 1
            output, weights = fast(new, memory, padding, None, state, need_weights, step=step)
            mask = torch.full((len(queries),) * 2, float("-inf"), **real).triu(1) if memory is None else None
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


SCRAMBLED = [[1, 1, 0, 3, 5, 4, 8, 8, 8], [0, 1, 2, 5, 3, 3, 6, 7, 8], [2, 0, 0, 7, 7, 6], [3, 4, 5], [2, 2, 1]]


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
def test_a_hypothesis_sees_its_ancestors_and_no_padding(split, twice):
    """Three sentences with three hypotheses each; each key is the step and the hypothesis that made it.

    "split" ends with orders that split sentences; "twice" has another order before each.
    """
    state, both = {}, nn.ModuleList([SharedBeamState(), TargetCache()])
    beam_state, cache = both
    ancestors = [[] for _ in range(9)]
    for step, order in enumerate([*SCRAMBLED[:2], [0, 4, 2, 1], [1, 1, 3]] if split else SCRAMBLED):
        count, padded = len(ancestors), {0, step} if step in (1, 2) else set()
        words = torch.tensor([[row not in padded] for row in range(count)])
        keys = torch.stack([torch.full((count,), step), torch.arange(count)], dim=1).double()
        mask = beam_state(state, 3, torch.zeros(1, count, C, **DOUBLE), words).mask
        beam = 1 if split and step > 2 else 3
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


# of six sentences: which stay, in which order, and whether some are moved in place
KEPT = [([0, 1, 2, 3], True), ([0, 5, 2, 3, 4], True), ([0, 5, 2, 4], True), ([0, 1, 2, 3, 4, 5], True),
        ([0, 2, 3, 4, 5], False), ([2, 1, 0], False), ([5, 4, 3], False), ([0, 1, 1, 3], False),
        ([0, 1, 2, 3, 4, 5, 5], False)]  # fmt: skip


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kept, in_place", KEPT, ids=str)
def test_sentences_that_take_places_of_others_are_moved_there(kept, in_place, beam):
    ranks = torch.randint(beam, (len(kept), beam))
    order = read_order((torch.tensor(kept).unsqueeze(1) * beam + ranks).flatten(), 6, beam)
    for dim in (0, 1):
        x = torch.randn(6, 6, 2)
        want = x.index_select(dim, torch.tensor(kept))
        assert torch.equal(keep_sources(x.clone().requires_grad_(), dim, order), want)
        with torch.no_grad():
            got = keep_sources(x, dim, order)
        assert torch.equal(got, want) and (got.data_ptr() == x.data_ptr()) is in_place
