"""fairseq's generator for a CPU, without what its beam search does beside the model.

The rules, and so the hypotheses, are those of fairseq's ``SequenceGenerator``. What differs is what they cost: the
first step has one hypothesis a sentence, words are neither normalised nor looked through for NaN one by one, few of
them are sorted (``decoding/candidates.py``), and the bookkeeping is in numpy (``decoding/hypotheses.py``). What it does
not know, as sampling or prefixes, is left to fairseq's.
"""

import math
from typing import Dict, List, Optional

import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fairseq_deep.core.attention.beams import CHECKED
from fairseq_deep.core.decoding.candidates import best_candidates, log_normaliser
from fairseq_deep.core.decoding.hypotheses import Hypotheses, rank_by_gnmt
from fairseq_deep.core.registry import UsageError


class Generator(SequenceGenerator):
    """Beam search over decoders of this package; arguments and results are those of fairseq's generator."""

    gnmt_lenpen: Optional[float] = None
    """Exponent of GNMT's length penalty, which is then the only one: `normalize_scores` has to be off."""

    _memory: Optional[Tensor] = None

    def _generate(self, sample: Dict[str, Dict[str, Tensor]], *args, **options):
        found = self._find(sample, *args, **options)
        # which hypotheses end does not depend on a length penalty, only their order does
        return found if self.gnmt_lenpen is None else rank_by_gnmt(found, self.gnmt_lenpen)

    def _find(
        self,
        sample: Dict[str, Dict[str, Tensor]],
        prefix_tokens: Optional[Tensor] = None,
        constraints: Optional[Tensor] = None,
        bos_token: Optional[int] = None,
    ):
        inputs = sample["net_input"]
        if prefix_tokens is not None or constraints is not None or not self._knows(inputs):
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        longest = min(int(self.max_len_a * inputs["src_tokens"].size(1) + self.max_len_b), self.max_len - 1)
        assert self.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"
        penalty = self.len_penalty if self.normalize_scores else None
        first = self.eos if bos_token is None else bos_token
        with torch.inference_mode():
            encoded = self.model.forward_encoder(inputs)
            for checked in (True, False):
                found = Hypotheses(inputs["src_tokens"].size(0), self.beam_size, longest, self.eos, penalty)
                if self._search(encoded, found, first, checked):
                    break
        if not all(found.ended):
            raise UsageError(
                "a sentence has no translation with a probability: the model gives NaN or infinite scores, as its "
                "weights do after training that has diverged (fairseq-deep diagnose shows where)"
            )
        return found.results()

    def _knows(self, inputs: Dict[str, Tensor]) -> bool:
        """Whether all that is asked for is known here."""
        source = inputs.get("src_tokens")
        plain = type(self.search) is search.BeamSearch and self.lm_model is None and self.repeat_ngram_blocker is None
        return (
            plain
            and not self.match_source_len
            and self.token_indices_to_suppress is None
            and source is not None
            and source.dim() == 2
            and source.device.type == "cpu"
            and all(_is_ours(model) for model in self.model.models)
        )

    def _search(self, encoded, found: Hypotheses, first: int, checked: bool) -> bool:
        """Fill *found*; the first word of all hypotheses is *first*.

        With *checked*, caches take keys without a look for NaN, and the search ends when there is any: it has not
        found anything then, and returns False.
        """
        states: List[Dict[str, Dict[str, Optional[Tensor]]]] = [
            {CHECKED: {}} if checked else {} for _ in self.model.models
        ]
        words = torch.full((len(found.numbers),), first)
        while True:
            logits, offsets, broken = self._log_probabilities(found.step, words, encoded, states)
            if broken and checked:
                return False
            self._forbid(logits, found)
            scores = found.scores
            offsets = offsets.view_as(scores) + scores
            count = min(2 * self.beam_size, self.vocab_size * self.beam_size - 1)
            if found.step == 0:
                count = min(count, self.vocab_size - 1)
            goes_on = found.advance(*best_candidates(logits, offsets, scores.size(1), count))
            if goes_on is None:
                return True
            words = goes_on.words
            # by now, all that attention needs of the encoder's output is in the states
            self.model.reorder_incremental_state(states, goes_on.order)

    def _log_probabilities(self, step: int, words: Tensor, encoded, states):
        """Scores of all words (hypotheses x words), what makes them log-probabilities when it is added to a row, and
        whether there are hypotheses without any."""
        prefix = words.unsqueeze(1).expand(-1, step + 1)  # of which models see the last word and the length
        outputs = []
        for model, encoder_out, state in zip(self.model.models, encoded, states):
            output = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)[0][:, -1]
            outputs.append(output if self.temperature == 1.0 else output / self.temperature)
        if len(outputs) == 1 and self.model.models[0].decoder.adaptive_softmax is None:
            return _with_normaliser(outputs[0], self._buffer(outputs[0]))
        logs = [
            model.get_normalized_probs((output.unsqueeze(1), None), log_probs=True)[:, -1]
            for model, output in zip(self.model.models, outputs)
        ]
        mean = logs[0] if len(logs) == 1 else torch.stack(logs).logsumexp(0) - math.log(len(logs))
        broken = bool(mean.isnan().any())
        return mean.nan_to_num_(-math.inf, math.inf, -math.inf), mean.new_zeros(mean.size(0)), broken

    def _buffer(self, like: Tensor) -> Tensor:
        """Memory that is written over at each step: new memory would cost more than what is done with it."""
        rows = like.size(0)
        if self._memory is None or self._memory.size(0) < rows:
            self._memory = torch.empty(like.shape)
        return self._memory[:rows]

    def _forbid(self, logits: Tensor, found: Hypotheses) -> None:
        """What is never chosen, or not at this step."""
        logits[:, self.pad] = -math.inf
        if self.unk_penalty:
            logits[:, self.unk] -= self.unk_penalty
        if found.step >= found.longest:
            logits[:, : self.eos] = -math.inf
            logits[:, self.eos + 1 :] = -math.inf
        if found.step < self.min_len:
            logits[:, self.eos] = -math.inf


def _is_ours(model) -> bool:
    """Whether the decoder sees nothing of a prefix but its last word, and gives no attention weights."""
    decoder = getattr(model, "decoder", None)
    return hasattr(decoder, "ancestry") and not decoder.stock and not decoder.need_attn


def _with_normaliser(logits: Tensor, buffer: Tensor):
    """What :meth:`Generator._log_probabilities` returns."""
    logits = logits.float()
    normaliser = log_normaliser(logits, buffer)
    broken = not math.isfinite(float(normaliser.sum()))
    if broken:
        rows = ~normaliser.isfinite()
        logits = logits.masked_fill(rows.unsqueeze(1), 0.0)
        normaliser = normaliser.masked_fill(rows, math.inf)
    return logits, normaliser.neg_(), broken
