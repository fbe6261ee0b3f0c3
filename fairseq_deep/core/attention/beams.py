"""State shared by the hypotheses of a sentence in beam search.

Beam search requests one source per hypothesis, but all hypotheses of a sentence have the same source. Sources, and the
keys and values computed from them, are therefore stored once per sentence.

Keys and values of the target are also stored per sentence, for all its hypotheses, and never move: position t of the
hypothesis that had rank s is in slot s of t. Beam reordering only changes a mask: a hypothesis sees the slots that its
predecessor saw.
"""

import uuid
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .beam_reorder import BeamReorder, IncrementalState, hypotheses_per_sentence, read_order
from .cache import append, select

LARGEST_BEAM = 32  # in larger beams, products with hidden keys take longer than copies of the keys


class DecodingStep(NamedTuple):
    """Inputs shared by all attentions of a decoding step; B hypotheses, each with one new position.

    Attributes:
        mask: sentences x 1 x beam x (T * beam), in the type of the queries: 0 where a hypothesis sees a key, -inf
            elsewhere and at padding. If each hypothesis has its own keys, it counts as one sentence.
        words: 1 x B x 1, true where a hypothesis has a token at the new position
        count: 1 x B x 1, at least fp32: the number of its tokens so far, at least 1
        place: indices of the new keys in caches of a fixed capacity (slots); None if caches grow
    """

    mask: Tensor | None
    words: Tensor
    count: Tensor | None
    place: Tensor | None


class SharedBeamState(nn.Module):
    """Maps hypotheses to sentences and to the slots of their keys; reordering beams then copies no keys.

    Args:
        attends: the decoder has self-attention, which needs a mask
        averages: the decoder has running means, which need counts
    """

    def __init__(self, attends: bool = True, averages: bool = False):
        super().__init__()
        self._state = f"{uuid.uuid4()}.beam_state"
        self.attends = attends
        self.averages = averages
        self.largest_beam = LARGEST_BEAM

    def forward(
        self, incremental_state: IncrementalState, sentences: int, query: Tensor, words: Tensor
    ) -> DecodingStep:
        """Advance by one position.

        Args:
            incremental_state: stores the state
            sentences: (first step) number of sources; all have the same number of hypotheses, the beam
            query: 1 x B x C, one row per hypothesis
            words: B x 1, true where the hypothesis has a token at this position, false where it has padding
        """
        if self._state not in incremental_state:
            incremental_state[self._state] = self._first(sentences, query)
        saved = incremental_state[self._state]
        mask, own, count, position = saved["mask"], saved["own"], saved["count"], saved["position"]
        seen = place = None
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
            room = mask if buffer is None else buffer  # narrowing the whole buffer keeps its strides
            seen = room.view(groups * beam // slots, 1, slots, room.size(2) * slots).narrow(3, 0, mask.size(2) * slots)
        words = words.t().unsqueeze(2)
        if count is not None:
            count = count + words
            saved["count"] = count
            count = count.clamp(min=1.0)
        return DecodingStep(seen, words, count, place)

    def _first(self, sentences: int, query: Tensor) -> dict[str, Tensor | None]:
        """Return the state before the first position.

        mask: sentences x beam x T x slots, the mask of :class:`DecodingStep`; one slot if each hypothesis has its own
            keys
        own: 2 x slots x slots, the part of the mask that each step adds: a hypothesis sees its own new key, or with
            padding at that position, none
        position, length: index of the next position in a mask of a fixed capacity (1), on the device and on the CPU;
            None if the mask grows
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
            wide = torch.promote_types(query.dtype, torch.float32)
            state["count"] = torch.zeros(1, rows, 1, dtype=wide, device=query.device)
        return state

    def _slots(self, beam: int) -> int:
        """Return the number of keys that are stored per sentence and position."""
        return beam if self.attends and beam <= self.largest_beam else 1

    def _own(self, slots: int, like: Tensor) -> Tensor:
        own = torch.full((2, slots, slots), float("-inf"), dtype=like.dtype, device=like.device)
        own[0].fill_diagonal_(0.0)
        return own

    def has_started(self, incremental_state: IncrementalState) -> bool:
        """Return whether there is a position already."""
        return self._state in incremental_state

    def go_on(self, incremental_state: IncrementalState) -> tuple[int, int]:
        """Count the next position; return the fixed capacity (0 if caches grow) and the number of positions."""
        if not self.attends:
            return 0, 0
        saved = incremental_state[self._state]
        mask, length = saved["mask"], saved["length"]
        # on the CPU, to avoid a synchronisation
        saved["length"] = torch.tensor(mask.size(2)) + 1 if length is None else length + 1
        return 0 if length is None else mask.size(2), int(saved["length"])

    def reserve(self, incremental_state: IncrementalState, capacity: int) -> int:
        """Allocate *capacity* positions, hidden while not in use; return the number of keys."""
        saved = incremental_state[self._state]
        mask, length = saved["mask"], saved["mask"].size(2)
        room = mask.new_full((mask.size(0), mask.size(1), capacity, mask.size(3)), float("-inf"))
        room[:, :, :length] = mask
        if saved["position"] is None:
            saved["position"] = torch.tensor([length], device=mask.device)
        saved["mask"], saved["buffer"] = room, None
        return capacity * mask.size(3)

    def reorder(self, incremental_state: IncrementalState, new_order: Tensor) -> BeamReorder | None:
        """Continue with the hypotheses *new_order* (B); return the effect on caches, or None before the first step."""
        if self._state not in incremental_state:
            return None
        saved = incremental_state[self._state]
        mask, buffer, own, count = saved["mask"], saved["buffer"], saved["own"], saved["count"]
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
            if slots > 1:  # from now on, each hypothesis has its own keys
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
                chosen = mask.copy_(chosen)  # in place: CUDA graphs need fixed addresses
            saved["mask"] = chosen
            saved["buffer"] = flat.view(groups, beam, flat.size(1), flat.size(2)) if flat is not None else None
        if count is not None:
            saved["count"] = count.index_select(1, new_order)
        return order

    def _widen(self, saved: dict[str, Tensor | None], new_order: Tensor, copies: int) -> BeamReorder:
        """Copy the only hypothesis of each sentence *copies* times; all see its keys, which are in the first slot."""
        mask, count = saved["mask"], saved["count"]
        groups, length, slots = mask.size(0), mask.size(2), self._slots(copies)
        wide = torch.full((groups, copies, length, slots), float("-inf"), dtype=mask.dtype, device=mask.device)
        wide[:, :, :, :1] = mask
        saved["mask"], saved["buffer"], saved["own"] = wide, None, self._own(slots, mask)
        if count is not None:
            saved["count"] = count.index_select(1, new_order)
        return BeamReorder(new_order, None, None, False, slots)
