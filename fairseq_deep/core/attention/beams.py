"""What the hypotheses of a sentence share in beam search.

Beam search asks for one source a hypothesis; all hypotheses of a sentence have the same. So sources, and the keys and
values made of them, are kept once a sentence.

Keys and values of the target are kept together, too, for all hypotheses of a sentence, and stay where they were made:
position t of the hypothesis that had rank s is in slot s of t. What a new order changes is a mask: the slots that a
hypothesis sees are those that the one which it goes on saw.
"""

import uuid
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .beam_reorder import BeamReorder, hypotheses_per_sentence, read_order
from .cache import append, select

CALLER_CHECKS_NAN = "fairseq_deep.caller_checks_nan"  # a key of incremental states; see :class:`DecodingStep`
LARGEST_BEAM = 32  # above, so many multiplications take longer than copies of the keys


class DecodingStep(NamedTuple):
    """What all attentions of a decoding step share; B hypotheses, each with one new position.

    Attributes:
        mask: sentences x 1 x beam x (T * beam), in the type of the queries: 0 where a hypothesis sees a key, -inf where
            not; it hides padding, too. Where each hypothesis has keys of its own, each counts as a sentence.
        words: 1 x B x 1, true where a hypothesis has a word at the new position
        count: 1 x B x 1, in fp32 at least: the number of words that it has by now, and at least 1
        place: where the new keys are in caches of a fixed capacity (slots); None where caches grow
        caller_checks_nan: caches store new keys as they are: the caller starts again from scratch if there is NaN
    """

    mask: Tensor | None
    words: Tensor
    count: Tensor | None
    place: Tensor | None
    caller_checks_nan: bool = False


class SharedBeamState(nn.Module):
    """Which hypotheses belong to a sentence, and in which slots their keys are, so that no order copies them.

    Args:
        attends: there is self-attention, which needs a mask
        averages: there are means, which need counts
    """

    def __init__(self, attends: bool = True, averages: bool = False):
        super().__init__()
        self._state = f"{uuid.uuid4()}.beam_state"
        self.attends = attends
        self.averages = averages
        self.largest_beam = LARGEST_BEAM

    def forward(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]],
        sentences: int,
        query: Tensor,
        words: Tensor,
    ) -> DecodingStep:
        """Go one position on.

        Args:
            incremental_state: where this is kept
            sentences: at the first step, number of sources, of which each has as many hypotheses, its beam
            query: 1 x B x C of the hypotheses
            words: B x 1, true where the hypothesis has a word at this position, false where it has padding
        """
        if self._state not in incremental_state:
            incremental_state[self._state] = self._first(sentences, query)
        saved = incremental_state[self._state]
        mask, own, count, position = saved["mask"], saved["own"], saved["count"], saved["position"]
        assert mask is not None and own is not None
        seen: Tensor | None = None
        place: Tensor | None = None
        if self.attends:
            groups, beam = mask.size(0), mask.size(1)
            slots = own.size(2)
            new = torch.where(words.view(groups, beam, 1), own[0], own[1]).unsqueeze(2)
            if position is None:
                mask, saved["buffer"] = append(mask, saved["buffer"], new)
                saved["mask"] = mask
            else:
                mask.index_copy_(2, position, new)
                place = position * slots + torch.arange(slots, device=mask.device)
                position.add_(1)
            buffer = saved["buffer"]
            room = mask if buffer is None else buffer  # of which a part keeps the strides
            seen = room.view(groups * beam // slots, 1, slots, room.size(2) * slots).narrow(3, 0, mask.size(2) * slots)
        words = words.t().unsqueeze(2)
        if count is not None:
            count = count + words
            saved["count"] = count
            count = count.clamp(min=1.0)
        return DecodingStep(seen, words, count, place, CALLER_CHECKS_NAN in incremental_state)

    def _first(self, sentences: int, query: Tensor) -> dict[str, Tensor | None]:
        """The state before the first position.

        mask: sentences x beam x T x slots, the mask of :class:`DecodingStep`, with one slot where each hypothesis has
            its own keys
        own: 2 x slots x slots, the part of it that is new at each step: each hypothesis sees the key that it makes; or,
            where that is of padding, none
        position, length: where the next one goes in a mask of a fixed capacity (1), on the device and on the CPU; None
            where it grows
        """
        rows = query.size(1)
        if sentences < 1 or rows % sentences != 0:
            sentences = rows
        beam = max(rows // max(sentences, 1), 1)
        slots = self._slots(beam)
        state: dict[str, Tensor | None] = {
            "mask": query.new_empty(sentences, beam, 0, slots),
            "buffer": None,
            "own": self._own(slots, query),
            "count": None,
            "position": None,
            "length": None,
        }
        if self.averages:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            state["count"] = torch.zeros(1, rows, 1, dtype=wide, device=query.device)
        return state

    def _slots(self, beam: int) -> int:
        """Keys that are kept for a position of a sentence."""
        return beam if self.attends and beam <= self.largest_beam else 1

    def _own(self, slots: int, like: Tensor) -> Tensor:
        own = torch.full((2, slots, slots), float("-inf"), dtype=like.dtype, device=like.device)
        own[0].fill_diagonal_(0.0)
        return own

    def has_started(self, incremental_state: dict[str, dict[str, Tensor | None]]) -> bool:
        """Whether there is a position already."""
        return self._state in incremental_state

    def go_on(self, incremental_state: dict[str, dict[str, Tensor | None]]) -> tuple[int, int]:
        """For how many positions there is room that does not grow, and how many there are with the one to come."""
        if not self.attends:
            return 0, 0
        saved = incremental_state[self._state]
        mask, length = saved["mask"], saved["length"]
        # on the CPU, so that nobody waits for a device
        saved["length"] = torch.tensor(mask.size(2)) + 1 if length is None else length + 1
        return 0 if length is None else mask.size(2), int(saved["length"])

    def reserve(self, incremental_state: dict[str, dict[str, Tensor | None]], capacity: int) -> int:
        """Make room for a *capacity* of positions, whether in use or hidden; the number of keys that this is."""
        saved = incremental_state[self._state]
        mask, length = saved["mask"], saved["mask"].size(2)
        room = mask.new_full((mask.size(0), mask.size(1), capacity, mask.size(3)), float("-inf"))
        room[:, :, :length] = mask
        if saved["position"] is None:
            saved["position"] = torch.tensor([length], device=mask.device)
        saved["mask"], saved["buffer"] = room, None
        return capacity * mask.size(3)

    def reorder(self, incremental_state: dict[str, dict[str, Tensor | None]], new_order: Tensor) -> BeamReorder | None:
        """Take over the hypotheses *new_order* (B), and tell what that does to caches; None before the first step."""
        if self._state not in incremental_state:
            return None
        saved = incremental_state[self._state]
        mask, buffer, own, count = saved["mask"], saved["buffer"], saved["own"], saved["count"]
        assert mask is not None and own is not None
        beam, slots, rows = mask.size(1), own.size(2), new_order.numel()
        if beam == 1 and saved["position"] is None:
            copies = hypotheses_per_sentence(new_order, mask.size(0))
            if copies > 1:
                return self._widen(saved, new_order, copies)
        order = read_order(new_order, mask.size(0), beam, mask if slots > 1 else None)
        if order.beam_indices is None:
            return order
        if order.splits_sentences:
            beam = 1
            if slots > 1:  # from now on, each hypothesis has keys of its own
                mask, buffer = mask.amax(dim=3, keepdim=True), None
                saved["own"] = own[:, :1, :1]
        groups, length = rows // beam, mask.size(2)
        if length == 0:
            saved["mask"] = mask.new_empty(groups, beam, 0, mask.size(3))
        else:
            flat = buffer.flatten(0, 1) if buffer is not None else None
            chosen, flat = select(mask.flatten(0, 1), flat, 0, new_order)
            chosen = chosen.view(groups, beam, length, mask.size(3))
            if saved["position"] is not None and chosen.shape == mask.shape:
                chosen = mask.copy_(chosen)  # where it is, as a graph of a device wants it
            saved["mask"] = chosen
            saved["buffer"] = flat.view(groups, beam, flat.size(1), flat.size(2)) if flat is not None else None
        if count is not None:
            saved["count"] = count.index_select(1, new_order)
        return order

    def _widen(self, saved: dict[str, Tensor | None], new_order: Tensor, copies: int) -> BeamReorder:
        """Each sentence's one hypothesis becomes so many; all see what it has seen, which is in the first slot."""
        mask, count = saved["mask"], saved["count"]
        assert mask is not None
        groups, length, slots = mask.size(0), mask.size(2), self._slots(copies)
        wide = torch.full((groups, copies, length, slots), float("-inf"), dtype=mask.dtype, device=mask.device)
        wide[:, :, :, :1] = mask
        saved["mask"], saved["buffer"], saved["own"] = wide, None, self._own(slots, mask)
        if count is not None:
            saved["count"] = count.index_select(1, new_order)
        return BeamReorder(new_order, None, None, False, slots)
