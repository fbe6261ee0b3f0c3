"""What the hypotheses of a sentence share in beam search.

Beam search asks for one source a hypothesis; all hypotheses of a sentence have the same. So sources, and the keys and
values made of them, are kept once a sentence. A hypothesis has the number sentence * beam + rank, and what beam search
asks for is an order of such numbers.

Keys and values of the target are kept together, too, for all hypotheses of a sentence, and stay where they were made:
position t of the hypothesis that had rank s is in slot s of t. What a new order changes is a small table of slots.
"""

import uuid
from typing import Dict, Optional

import torch
from torch import Tensor, nn

LARGEST_BEAM = 32  # above, so many multiplications take longer than copies of the keys


def hypotheses_per_sentence(new_order: Tensor, sentences: int) -> int:
    """The beam k if *new_order* (B) is 0 k times, 1 k times, ...: k hypotheses of each sentence; else 1."""
    beam = new_order.numel() // max(sentences, 1)
    if beam > 1 and beam * sentences == new_order.numel():
        numbers = torch.arange(new_order.numel(), device=new_order.device)
        if torch.equal(new_order, torch.div(numbers, beam, rounding_mode="floor").to(new_order)):
            return beam
    return 1


def kept_sentences(new_order: Tensor, beam: int) -> Optional[Tensor]:
    """The sentences (B / beam) to which the hypotheses *new_order* (B) belong; None if their groups are torn apart."""
    if new_order.numel() % beam != 0:
        return None
    groups = torch.div(new_order, beam, rounding_mode="floor").view(-1, beam)
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        return None
    return groups[:, 0]


def same_sentences(sentences: Tensor, count: int) -> bool:
    """Whether *sentences* are all of *count*, in order."""
    in_order = torch.arange(count, dtype=sentences.dtype, device=sentences.device)
    return sentences.numel() == count and torch.equal(sentences, in_order)


def select_hypotheses(grouped: Tensor, new_order: Tensor) -> Tensor:
    """The hypotheses *new_order* of *grouped* (sentences x beam x N), where no sentence is torn apart."""
    beam, length = grouped.size(1), grouped.size(2)
    return grouped.view(-1, length).index_select(0, new_order).view(-1, beam, length)


class Ancestry(nn.Module):
    """In which slots the keys and values of a hypothesis are, so that no new order has to copy them."""

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.slots"
        self.largest_beam = LARGEST_BEAM

    def forward(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        sentences: int,
        query: Tensor,
        padding: Optional[Tensor],
    ) -> Optional[Tensor]:
        """Go one position on.

        Args:
            incremental_state: where the slots are kept
            sentences: at the first step, number of sources, of which each has as many hypotheses, its beam
            query: 1 x B x C of the hypotheses
            padding: B x 1, true where the hypothesis has no word at this position

        Returns:
            sentences x 1 x beam x (T * beam), in the type of *query*: 0 where a hypothesis sees a key, -inf where not;
            None if each hypothesis has keys of its own, as with beams above ``LARGEST_BEAM``
        """
        if self._state not in incremental_state:
            beam = query.size(1) // max(sentences, 1)
            shared = 1 < beam <= self.largest_beam and beam * sentences == query.size(1)
            start = torch.empty(sentences, beam, 0, dtype=torch.long, device=query.device) if shared else None
            incremental_state[self._state] = {"slots": start}
        saved = incremental_state[self._state]
        slots = saved["slots"]
        if slots is None:
            return None
        sentences, beam = slots.size(0), slots.size(1)
        ranks = torch.arange(beam, device=query.device)
        own = ranks.expand(sentences, beam).unsqueeze(2)
        if padding is not None:
            own = own.masked_fill(padding.view(sentences, beam, 1), -1)
        slots = torch.cat([slots, own], dim=2)
        saved["slots"] = slots
        mask = torch.zeros(sentences, beam, slots.size(2), beam, dtype=query.dtype, device=query.device)
        return mask.masked_fill(slots.unsqueeze(3) != ranks, float("-inf")).view(sentences, 1, beam, -1)

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> Dict[str, Dict[str, Optional[Tensor]]]:
        """Take over the slots of the hypotheses *new_order* (B)."""
        if self._state in incremental_state:
            slots = incremental_state[self._state]["slots"]
            if slots is not None:
                beam = slots.size(1)
                torn = kept_sentences(new_order, beam) is None
                incremental_state[self._state]["slots"] = None if torn else select_hypotheses(slots, new_order)
        return incremental_state
