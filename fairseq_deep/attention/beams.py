"""What the hypotheses of a sentence share in beam search.

Beam search asks for one source a hypothesis; all hypotheses of a sentence have the same. So sources, and the keys and
values made of them, are kept once a sentence. A hypothesis has the number sentence * beam + rank, and what beam search
asks for is an order of such numbers.

Keys and values of the target are kept together, too, for all hypotheses of a sentence, and stay where they were made:
position t of the hypothesis that had rank s is in slot s of t. What a new order changes is a small table of slots.
"""

import uuid
from typing import Dict, NamedTuple, Optional

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


class Order(NamedTuple):
    """What a new order of hypotheses does to what is kept of them; decided once, for all caches.

    Attributes:
        hypotheses: the hypotheses that are taken over (B)
        sources: the sources that are kept: one a sentence, or where sentences are torn apart, one a hypothesis
        same_hypotheses, same_sources: these are all that there were, in order
        slots: where keys of the target are kept together: the slots (sentences x beam x T) before the new order
        torn: hypotheses of a sentence do not stay together
    """

    hypotheses: Tensor
    sources: Tensor
    same_hypotheses: bool
    same_sources: bool
    slots: Optional[Tensor]
    torn: bool


def read_order(new_order: Tensor, sentences: int, beam: int, slots: Optional[Tensor] = None) -> Order:
    """What *new_order* (B) does where each of so many *sentences* has *beam* hypotheses.

    The device is asked once.
    """
    owners = torch.div(new_order, beam, rounding_mode="floor")
    numbers = torch.arange(new_order.numel(), dtype=new_order.dtype, device=new_order.device)
    in_order = new_order.eq(numbers).all().long()
    if new_order.numel() % beam != 0:
        return Order(new_order, owners, False, False, slots, True)
    groups = owners.view(-1, beam)
    kept = groups[:, 0]
    whole, kept_in_order = groups.eq(groups[:, :1]).all().long(), kept.eq(numbers[: kept.numel()]).all().long()
    facts = int(whole + 2 * in_order + 4 * kept_in_order)
    same_hypotheses = facts & 2 > 0 and new_order.numel() == sentences * beam
    if facts & 1 == 0:
        return Order(new_order, owners, same_hypotheses, False, slots, True)
    return Order(new_order, kept, same_hypotheses, facts & 4 > 0 and kept.numel() == sentences, slots, False)


class Ancestry(nn.Module):
    """Which hypotheses belong to a sentence, and in which slots their keys are, so that no order copies them.

    Args:
        shares: there is self-attention, whose keys and values can be kept together
    """

    def __init__(self, shares: bool = True):
        super().__init__()
        self._state = f"{uuid.uuid4()}.slots"
        self.shares = shares
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
            incremental_state[self._state] = self._first(sentences, query)
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

    def _first(self, sentences: int, query: Tensor) -> Dict[str, Optional[Tensor]]:
        """The state before the first position: the hypotheses of each sentence, and slots if they share keys."""
        rows = query.size(1)
        if sentences < 1 or rows % sentences != 0:
            sentences = rows
        beam = max(rows // max(sentences, 1), 1)
        shared = self.shares and 1 < beam <= self.largest_beam
        slots = torch.empty(sentences, beam, 0, dtype=torch.long, device=query.device) if shared else None
        hypotheses = torch.arange(rows, device=query.device).view(sentences, beam)
        state: Dict[str, Optional[Tensor]] = {"slots": slots, "hypotheses": hypotheses}
        return state

    @torch.jit.export
    def reorder(self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor) -> Optional[Order]:
        """Take over the hypotheses *new_order* (B), and tell what that does to caches; None before the first step."""
        if self._state not in incremental_state:
            return None
        saved = incremental_state[self._state]
        hypotheses, slots = saved["hypotheses"], saved["slots"]
        assert hypotheses is not None
        beam = hypotheses.size(1)
        order = read_order(new_order, hypotheses.size(0), beam, slots)
        numbers = torch.arange(new_order.numel(), device=new_order.device)
        saved["hypotheses"] = numbers.view(-1, 1 if order.torn else beam)
        if slots is not None:
            length = slots.size(2)
            taken = slots.view(-1, length).index_select(0, new_order).view(-1, beam, length) if not order.torn else None
            saved["slots"] = taken
        return order
