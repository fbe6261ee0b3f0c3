"""Beam search with one model or an ensemble, on a CPU or a GPU, with the rules of fairseq's generator.

It finds fairseq's hypotheses at a lower cost: the first step has one hypothesis per sentence, scores of tokens are
neither normalised nor checked for NaN one by one, and few of them are sorted (``candidates.py``). The bookkeeping is in
numpy (``hypotheses.py``), and each step synchronises with the device once, to read its candidates.

The score of a hypothesis y of the source x is

    score(y) = log p(y | x) / |y|^A,    log p(y | x) = sum_t log p(y_t | y_1 ... y_(t-1), x)

An ensemble of N models uses log 1/N sum_n p_n(y_t | ...) instead of log p. |y| counts the end-of-sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError

from .candidates import best_candidates, log_normaliser
from .choices import draw, forbid_repeats
from .hypotheses import Hypotheses, rank_by_gnmt
from .options import SearchOptions


class BeamSearch:
    """Search for translations of a batch.

    Args:
        models: the models of an ensemble, with ``encoder`` and ``decoder``, in evaluation mode
        options: see :class:`SearchOptions`
        pad, eos, unk: indices of padding, end-of-sentence and the unknown token
        suppressed: tokens that are never chosen
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
            prefix: B x P, first tokens of all hypotheses; positions of padding are free
            first: first input token of the decoder; None: end-of-sentence

        Returns:
            for each sentence its hypotheses, the best first: ``tokens`` (T, with end-of-sentence), ``score``,
            ``positional_scores`` (T), and if the decoders return attention weights, ``attention`` (S x T)

        Raises:
            UsageError: the minimum length exceeds the maximum, the beam exceeds the dictionary, or the scores of a
                model are not finite
        """
        longest, lengths = self._lengths(src_tokens)
        limits = self._limits(src_tokens, longest) if self.options.limit_each else None
        sizes = (src_tokens.size(0), self.options.beam, longest, self.eos)
        found = Hypotheses(*sizes, self.options.penalty, lengths, limits)
        # in inference mode, calls are cheaper
        with torch.inference_mode(src_tokens.device.type == "cpu"), torch.no_grad():
            self._search(src_tokens, found, self.eos if first is None else first, prefix)
        if not all(found.ended):
            raise UsageError(
                "a sentence has no translation with a probability: the model gives NaN or infinite scores, for example "
                "because training has diverged; find the layer with fairseq-deep diagnose"
            )
        results = found.results()
        # a length penalty only changes the order of ended hypotheses
        return rank_by_gnmt(results, self.options.lenpen) if self.options.gnmt_lenpen else results

    def _lengths(self, src_tokens: Tensor) -> tuple[int, list[int] | None]:
        """Return the maximum number of tokens, and the maximum of each sentence if it depends on the source."""
        options, lengths = self.options, None
        longest = int(options.max_len_a * src_tokens.size(1) + options.max_len_b)
        longest = min(longest, *(model.decoder.max_positions() - 1 for model in self.models))
        if options.match_source_len:
            lengths = (src_tokens.ne(self.pad) & src_tokens.ne(self.eos)).sum(1).tolist()
            longest = max(lengths)
        if options.min_len > longest:
            raise UsageError(
                f"min_len {options.min_len} exceeds the maximum length, {longest}; lower it, or raise max_len_b"
            )
        return longest, lengths

    def _limits(self, src_tokens: Tensor, longest: int) -> list[int]:
        """Return the maximum number of tokens for the length of each source."""
        options, sizes = self.options, src_tokens.ne(self.pad).sum(1).tolist()
        found = [int(options.max_len_a * size + options.max_len_b) for size in sizes]
        return [min(longest, max(options.min_len, limit)) for limit in found]

    def _search(self, src_tokens: Tensor, found: Hypotheses, first: int, prefix: Tensor | None) -> None:
        """Fill *found*."""
        states = [model.decoder.start(model.encoder(src_tokens), self.options.beam) for model in self.models]
        device = src_tokens.device
        words = torch.full((len(found.numbers),), first, device=device)
        while True:
            logits, offsets = self._log_probabilities(found, words, states)
            self._forbid(logits, found, prefix)
            candidates = self._candidates(logits, offsets, found)
            goes_on = found.advance(*(each.cpu() for each in candidates))
            if goes_on is None:
                return
            words, order = goes_on.words.to(device), goes_on.order.to(device)
            for state in states:
                state.reorder(order)

    def _candidates(self, logits: Tensor, offsets: Tensor, found: Hypotheses) -> tuple[Tensor, Tensor, Tensor]:
        scores, beam, size = found.scores.to(logits.device), self.options.beam, logits.size(1)
        if self.options.sampling:
            return draw(logits + offsets.unsqueeze(1), scores, self.options)
        count = min(2 * beam, size * (1 if found.step == 0 else beam) - 1)
        if count < beam:
            raise UsageError(f"beam {beam} exceeds the {count} tokens that a hypothesis can begin with: lower it")
        return best_candidates(logits, offsets.view_as(scores) + scores, scores.size(1), count)

    def _log_probabilities(self, found: Hypotheses, words: Tensor, states) -> tuple[Tensor, Tensor]:
        """Return scores of all tokens (hypotheses x V), and an offset per row that makes them log-probabilities."""
        outputs, weights = [], []
        for state in states:
            output, attn = state.step(words)
            weights += [] if attn is None else [attn]
            outputs.append(output if self.options.temperature == 1.0 else output / self.options.temperature)
        if weights:
            found.attend(torch.stack(weights).sum(0).div_(len(self.models)).float().cpu())
        if len(outputs) == 1 and outputs[0].device.type == "cpu":
            return _with_normaliser(outputs[0])
        logs = torch.stack([output.float().log_softmax(-1) for output in outputs])
        mean = logs[0] if len(outputs) == 1 else logs.logsumexp(0) - math.log(len(outputs))
        return mean.nan_to_num_(-math.inf, math.inf, -math.inf), mean.new_zeros(mean.size(0))

    def _forbid(self, logits: Tensor, found: Hypotheses, prefix: Tensor | None) -> None:
        """Set the scores of forbidden tokens to -inf, in place."""
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
        """Force each sentence to continue with its token in *words*, except padding."""
        words = words.repeat_interleave(logits.size(0) // words.numel()).to(logits.device)
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, words.unsqueeze(1), False)
        logits.masked_fill_(others & words.ne(self.pad).unsqueeze(1), -math.inf)


def _with_normaliser(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of :meth:`BeamSearch._log_probabilities` for one model."""
    logits = logits.float()
    normaliser = log_normaliser(logits)
    if not math.isfinite(float(normaliser.sum())):
        rows = ~normaliser.isfinite()
        logits = logits.masked_fill(rows.unsqueeze(1), 0.0)
        normaliser = normaliser.masked_fill(rows, math.inf)
    return logits, normaliser.neg_()
