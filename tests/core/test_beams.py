"""State of beam search: caches in place, shared keys, sentences that move; steps are proven in ``test_steps.py``."""

import pytest
import torch

from fairseq_deep.core.attention.beam_reorder import keep_sources, read_order
from fairseq_deep.core.attention.cache import append, select

C = 8


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
