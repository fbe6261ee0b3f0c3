"""Beam search asks for one source a hypothesis; all hypotheses of a sentence have the same.

So sources, and the keys and values made of them, are kept once a sentence. A hypothesis has the number
sentence * beam + rank, and what beam search asks for is an order of such numbers.
"""

from typing import Optional

import torch
from torch import Tensor


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
    return sentences.numel() == count and torch.equal(sentences, torch.arange(count).to(sentences))
