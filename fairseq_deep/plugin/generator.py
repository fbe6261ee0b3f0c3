"""fairseq's generator with the search of this package (:class:`~fairseq_deep.core.search.BeamSearch`).

The search follows the rules of fairseq's ``SequenceGenerator`` and returns the same hypotheses. fairseq's class handles
options that the search does not support, such as constraints, diverse beams or a language model.
"""

from __future__ import annotations

from fairseq import search
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_deep.core.decoder import Decoder
from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.core.search.hypotheses import rank_by_gnmt


class Generator(SequenceGenerator):
    """Generator for models of this package, with the arguments and results of fairseq's generator."""

    gnmt_lenpen = False
    """Divide scores by GNMT's length penalty (``--gnmt-lenpen``); *normalize_scores* is off then."""

    def _generate(
        self,
        sample: dict[str, dict[str, Tensor]],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ):
        source = sample["net_input"].get("src_tokens")
        ends = prefix_tokens is not None and bool(prefix_tokens.eq(self.eos).any())
        if constraints is not None or ends or source is None or source.dim() != 2 or not self.is_supported():
            found = super()._generate(sample, prefix_tokens, constraints, bos_token)
            return rank_by_gnmt(found, self.len_penalty) if self.gnmt_lenpen else found
        return self._search()(source, prefix_tokens, bos_token)

    def is_supported(self) -> bool:
        """Return whether the search supports the models and the requested options."""
        known = type(self.search) in (search.BeamSearch, search.Sampling) and self.lm_model is None
        return known and all(_is_ours(model) for model in self.model.models)

    def _search(self) -> BeamSearch:
        sampling = type(self.search) is search.Sampling
        blocker = self.repeat_ngram_blocker
        options = SearchOptions(
            beam=self.beam_size,
            max_len_a=self.max_len_a,
            max_len_b=self.max_len_b,
            min_len=self.min_len,
            lenpen=self.len_penalty,
            unnormalized=not (self.normalize_scores or self.gnmt_lenpen),
            gnmt_lenpen=self.gnmt_lenpen,
            unkpen=self.unk_penalty,
            temperature=self.temperature,
            no_repeat_ngram_size=0 if blocker is None else blocker.no_repeat_ngram_size,
            sampling=sampling,
            sampling_topk=self.search.sampling_topk if sampling else -1,
            sampling_topp=self.search.sampling_topp if sampling else -1.0,
            match_source_len=self.match_source_len,
        )
        suppressed = [] if self.token_indices_to_suppress is None else self.token_indices_to_suppress.tolist()
        return BeamSearch(self.model.models, options, self.pad, self.eos, self.unk, suppressed)


class AlignedGenerator(SequenceGeneratorWithAlignment, Generator):
    """:class:`Generator` with ``--print-alignment``: fairseq's class adds alignments to the hypotheses."""


def _is_ours(model) -> bool:
    decoder = getattr(model, "decoder", None)
    return isinstance(decoder, Decoder) and getattr(decoder, "adaptive_softmax", None) is None
