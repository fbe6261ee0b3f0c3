"""Beam search with one model or an ensemble, on a CPU or a GPU, with the rules of fairseq's generator.

The rules, and so the hypotheses, are fairseq's. What differs is their cost: the first step has one hypothesis per
sentence, words are neither normalised nor searched for NaN one by one, few of them are sorted (``candidates.py``), the
bookkeeping is in numpy (``hypotheses.py``), and the device is asked once per step, for its candidates.

The score of a hypothesis y of the source x is

    score(y) = log p(y | x) / |y|^A,    log p(y | x) = sum_t log p(y_t | y_1 ... y_(t-1), x)

and that of an ensemble of N models has log 1/N sum_n p_n(y_t | ...) in place of log p. |y| counts the end-of-sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention.beams import CALLER_CHECKS_NAN
from fairseq_deep.core.registry import UsageError

from .candidates import best_candidates, log_normaliser
from .choices import draw, forbid_repeats
from .hypotheses import Hypotheses, rank_by_gnmt
from .options import SearchOptions


class BeamSearch:
    """Search for translations of a batch.

    Args:
        models: those of an ensemble, with ``encoder`` and ``decoder``, in evaluation mode
        options: see :class:`SearchOptions`
        pad, eos, unk: indices of padding, end-of-sentence and the unknown word
        suppressed: words that are never chosen
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        options: SearchOptions | None = None,
        pad: int = 1,
        eos: int = 2,
        unk: int = 3,
        suppressed: Sequence[int] = (),
    ):
        self.models, self.options = list(models), options or SearchOptions()
        self.pad, self.eos, self.unk, self.suppressed = pad, eos, unk, list(suppressed)

    def __call__(
        self, src_tokens: Tensor, prefix: Tensor | None = None, first: int | None = None
    ) -> list[list[dict[str, Tensor]]]:
        """Translate a batch.

        Args:
            src_tokens: B x S, padded
            prefix: B x P, words that all hypotheses begin with; padding leaves the rest open
            first: what the decoder reads first; None: end-of-sentence

        Returns:
            for each sentence its hypotheses, the best first: ``tokens`` (T, with end-of-sentence), ``score``,
            ``positional_scores`` (T), and where the decoders return attention weights, ``attention`` (S x T)

        Raises:
            UsageError: the least length exceeds the greatest, or a model gives no sentence a probability
        """
        longest, lengths = self._lengths(src_tokens)
        limits = self._limits(src_tokens, longest) if self.options.limit_each else None
        on_cpu = src_tokens.device.type == "cpu"
        with torch.inference_mode(on_cpu), torch.no_grad():  # in inference mode, calls are cheaper
            encoded = [model.encoder(src_tokens) for model in self.models]
            # a CPU looks for NaN once per step, and searches again without that if there is any
            for checks_nan in (True, False) if on_cpu else (False,):
                sizes = (src_tokens.size(0), self.options.beam, longest, self.eos)
                found = Hypotheses(*sizes, self.options.penalty, lengths, limits)
                if self._search(encoded, found, self.eos if first is None else first, prefix, checks_nan):
                    break
        if not all(found.ended):
            raise UsageError(
                "a sentence has no translation with a probability: the model gives NaN or infinite scores, as its "
                "weights do after training that has diverged (fairseq-deep diagnose shows where)"
            )
        results = found.results()
        # which hypotheses end does not depend on a length penalty, only their order does
        return rank_by_gnmt(results, self.options.lenpen) if self.options.gnmt_lenpen else results

    def _lengths(self, src_tokens: Tensor) -> tuple[int, list[int] | None]:
        """The greatest number of words, and that of each sentence where the source says it."""
        options, lengths = self.options, None
        longest = int(options.max_len_a * src_tokens.size(1) + options.max_len_b)
        longest = min(longest, *(model.decoder.max_positions() - 1 for model in self.models))
        if options.match_source_len:
            lengths = (src_tokens.ne(self.pad) & src_tokens.ne(self.eos)).sum(1).tolist()
            longest = max(lengths)
        if options.min_len > longest:
            raise UsageError(
                f"min_len {options.min_len} exceeds the greatest length, {longest}; lower it, or raise max_len_b"
            )
        return longest, lengths

    def _limits(self, src_tokens: Tensor, longest: int) -> list[int]:
        """The greatest number of words of each sentence by its own length."""
        options, sizes = self.options, src_tokens.ne(self.pad).sum(1).tolist()
        found = [int(options.max_len_a * size + options.max_len_b) for size in sizes]
        return [min(longest, max(options.min_len, limit)) for limit in found]

    def _search(self, encoded, found: Hypotheses, first: int, prefix: Tensor | None, checks_nan: bool) -> bool:
        """Fill *found*.

        With *checks_nan*, caches store keys without a check for NaN. The search then returns False, and has found
        nothing, if there is any.
        """
        states: list[dict] = [{CALLER_CHECKS_NAN: {}} if checks_nan else {} for _ in self.models]
        device = encoded[0]["encoder_out"][0].device
        words = torch.full((len(found.numbers),), first, device=device)
        while True:
            logits, offsets, broken = self._log_probabilities(found, words, encoded, states)
            if checks_nan and broken:
                return False
            self._forbid(logits, found, prefix)
            candidates = self._candidates(logits, offsets, found)
            goes_on = found.advance(*(each.cpu() for each in candidates))
            if goes_on is None:
                return True
            words, order = goes_on.words.to(device), goes_on.order.to(device)
            # by now, all that attention needs of the encoder's output is in the states
            for model, state in zip(self.models, states):
                model.decoder.reorder_incremental_state_scripting(state, order)

    def _candidates(self, logits: Tensor, offsets: Tensor, found: Hypotheses) -> tuple[Tensor, Tensor, Tensor]:
        scores, beam, size = found.scores.to(logits.device), self.options.beam, logits.size(1)
        if self.options.sampling:
            return draw(logits + offsets.unsqueeze(1), scores, self.options)
        count = min(2 * beam, size * (1 if found.step == 0 else beam) - 1)
        return best_candidates(logits, offsets.view_as(scores) + scores, scores.size(1), count)

    def _log_probabilities(self, found: Hypotheses, words: Tensor, encoded, states):
        """Scores of all words (hypotheses x words), what makes them log-probabilities when it is added to a row, and
        (on a CPU) whether there are hypotheses without any."""
        prefix = words.unsqueeze(1).expand(-1, found.step + 1)  # of which models see the last word and the length
        outputs, weights = [], []
        for model, encoder_out, state in zip(self.models, encoded, states):
            output, extra = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)
            weights += [attn[:, -1] for attn in extra["attn"] if attn is not None]
            output = output[:, -1]
            outputs.append(output if self.options.temperature == 1.0 else output / self.options.temperature)
        if weights:
            found.attend(torch.stack(weights).sum(0).div_(len(self.models)).float().cpu())
        if len(outputs) == 1 and outputs[0].device.type == "cpu":
            return _with_normaliser(outputs[0])
        logs = torch.stack([output.float().log_softmax(-1) for output in outputs])
        mean = logs[0] if len(outputs) == 1 else logs.logsumexp(0) - math.log(len(outputs))
        broken = mean.device.type == "cpu" and bool(mean.isnan().any())
        return mean.nan_to_num_(-math.inf, math.inf, -math.inf), mean.new_zeros(mean.size(0)), broken

    def _forbid(self, logits: Tensor, found: Hypotheses, prefix: Tensor | None) -> None:
        """Hide in place what is never chosen, or not at this step."""
        step, options = found.step, self.options
        logits[:, self.pad] = -math.inf
        if options.unkpen:
            logits[:, self.unk] -= options.unkpen
        if found.at_limit.any():
            rows = torch.from_numpy(found.at_limit).repeat_interleave(len(logits) // len(found.at_limit))
            ends = logits[:, self.eos].clone()
            logits.masked_fill_(rows.unsqueeze(1).to(logits.device), -math.inf)
            logits[:, self.eos] = ends
        if prefix is not None and step < prefix.size(1) and step < found.longest:
            numbers, ends = (torch.from_numpy(each).to(prefix.device) for each in (found.numbers, found.at_limit))
            self._force(logits, prefix[numbers, step].masked_fill(ends, self.pad))
        else:
            if step < options.min_len:
                logits[:, self.eos] = -math.inf
            if self.suppressed:
                logits[:, self.suppressed] = -math.inf
        if options.no_repeat_ngram_size:
            forbid_repeats(logits, found.prefixes(), options.no_repeat_ngram_size)

    def _force(self, logits: Tensor, words: Tensor) -> None:
        """Leave each sentence its word of *words*, where that is not padding."""
        words = words.repeat_interleave(logits.size(0) // words.numel()).to(logits.device)
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, words.unsqueeze(1), False)
        logits.masked_fill_(others & words.ne(self.pad).unsqueeze(1), -math.inf)


def _with_normaliser(logits: Tensor):
    """What :meth:`BeamSearch._log_probabilities` returns."""
    logits = logits.float()
    normaliser = log_normaliser(logits)
    broken = not math.isfinite(float(normaliser.sum()))
    if broken:
        rows = ~normaliser.isfinite()
        logits = logits.masked_fill(rows.unsqueeze(1), 0.0)
        normaliser = normaliser.masked_fill(rows, math.inf)
    return logits, normaliser.neg_(), broken
