"""Beam reordering at each step of beam search, and its effect on cached state.

A hypothesis has the index sentence * beam + rank. Beam search keeps the hypotheses of a sentence together; other
callers of the model may split them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .masks import is_sync_free

IncrementalState = dict[str, dict[str, Tensor | None]]
"""State of a decoder's modules between positions, by the key of the module."""


def hypotheses_per_sentence(new_order: Tensor, sentences: int) -> int:
    """Return the beam k if *new_order* (B) is 0 k times, 1 k times, ...: k hypotheses per sentence; else 1."""
    beam = new_order.numel() // max(sentences, 1)
    if beam > 1 and beam * sentences == new_order.numel():
        numbers = torch.arange(new_order.numel(), device=new_order.device)
        if torch.equal(new_order, torch.div(numbers, beam, rounding_mode="floor").to(new_order)):
            return beam
    return 1


class BeamReorder(NamedTuple):
    """The effect of a beam reordering on cached state; computed once for all caches.

    Attributes:
        beam_indices: the hypotheses that continue (B); None if all do, in order
        sources: the sources that continue, one per sentence, or per hypothesis where sentences are split; None if all
            do, in order
        mask: for caches that are shared per sentence, the keys that each hypothesis sees before the reordering
            (sentences x beam x T x slots)
        splits_sentences: hypotheses of a sentence do not stay together
        copies: this many hypotheses start as copies of one, and share its sentence from now on
        moves: (from, to) of the *sources* that fill the gaps of finished sentences, if all others keep their position
    """

    beam_indices: Tensor | None
    sources: Tensor | None
    mask: Tensor | None
    splits_sentences: bool
    copies: int = 1
    moves: list[tuple[int, int]] | None = None


def keep_sources(x: Tensor, dim: int, order: BeamReorder) -> Tensor:
    """Select the sources of *order* in dimension *dim* of *x*, which must have no other references.

    Moves entries within *x* if gradients are disabled and few sources change position.
    """
    sources, moves = order.sources, order.moves
    if sources is None:
        return x
    if moves is None or torch.is_grad_enabled() or x.requires_grad:
        return x.index_select(dim, sources)
    for source, place in moves:
        x.select(dim, place).copy_(x.select(dim, source))
    return x.narrow(dim, 0, sources.numel())


def _ask(new_order: Tensor, sentences: int, beam: int) -> tuple[bool, bool]:
    """Return whether each sentence keeps its position, and whether hypotheses of a sentence are split.

    Synchronises with the device once if sentences continue or end, as in beam search; twice if they change position.
    """
    if new_order.numel() % beam != 0:
        return False, True
    owners = torch.div(new_order, beam, rounding_mode="floor").view(-1, beam)
    if owners.size(0) == sentences:
        numbers = torch.arange(sentences, device=owners.device).unsqueeze(1)
        if bool(owners.eq(numbers).all()):
            return True, False
    return False, beam > 1 and not bool(owners.eq(owners[:, :1]).all())


def _remember(new_order: Tensor, sentences: int, beam: int) -> tuple[bool, bool]:
    """Return :func:`_ask`, cached on the tensor: decoders and encoders receive the same tensor in turn."""
    if new_order.is_inference():  # it has no version, so a change would go unnoticed
        return _ask(new_order, sentences, beam)
    question = (id(new_order), sentences, beam, new_order._version)  # a copy of the tensor has the same attributes
    known = getattr(new_order, "_fairseq_deep", None)
    if known is None or known[0] != question:
        known = (question, _ask(new_order, sentences, beam))
        new_order._fairseq_deep = known
    return known[1]


def read_order(new_order: Tensor, sentences: int, beam: int, mask: Tensor | None = None) -> BeamReorder:
    """Return the effect of *new_order* (B) on *sentences* with *beam* hypotheses each.

    Args:
        new_order: the hypotheses that continue
        sentences, beam: their numbers before the reordering
        mask: see :class:`BeamReorder`
    """
    stays, splits = _remember(new_order, sentences, beam)
    beam_indices, sources, moves = (None if stays and beam == 1 else new_order), None, None
    if not stays:
        sources = torch.div(new_order if splits else new_order[::beam], beam, rounding_mode="floor")
        if not splits and is_sync_free(sources):
            moves = _moves(sources.tolist(), sentences)
    return BeamReorder(beam_indices, sources, mask, splits, 1, moves)


def _moves(sources: list[int], sentences: int) -> list[tuple[int, int]] | None:
    """Return the moves of :class:`BeamReorder`; None if it does not apply or copying all sources is as fast."""
    moves = [(source, place) for place, source in enumerate(sources) if source != place]
    few = len(sources) <= sentences and 2 * len(moves) <= len(sources)
    return moves if few and all(source >= len(sources) for source, _ in moves) else None
