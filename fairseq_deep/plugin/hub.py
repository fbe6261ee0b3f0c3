"""fairseq's hub interface for the models of this package: ``from_pretrained(...).translate("...")``.

It differs from fairseq's in its answers to unsuitable input: fairseq invents text for an empty sentence, leaves out
skipped sentences, so the rest moves up, ignores unknown settings, and ends in tracebacks. It says
nothing of unknown words, as without the model's sub-words.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from fairseq.hub_utils import GeneratorHubInterface
from torch import Tensor

from fairseq_deep.core.registry import UsageError
from fairseq_deep.runtime.text import is_part

from .generation_settings import check_settings

logger = logging.getLogger(__name__)

UNSUPPORTED = {
    "constraints": "use fairseq-interactive --constraints",
    "score_reference": "use fairseq-generate --score-reference",
    "print_alignment": "use fairseq-generate --print-alignment",
    "replace_unk": "use fairseq-generate --replace-unk",
    "retain_dropout": "use fairseq-generate --retain-dropout",
    "lm_path": "use fairseq-generate --lm-path",
}
"""Settings without effect in fairseq's interface, or for which it lacks data, with alternatives."""


class HubInterface(GeneratorHubInterface):
    """fairseq's interface; ``translate``, ``sample``, ``generate`` take its arguments and settings of generation."""

    def sample(self, sentences, beam: int = 1, verbose: bool = False, **settings: Any):
        """Translate a string, or strings; an empty one, and one that is skipped as too long, becomes ``""``.

        Raises:
            UsageError: a sentence is not a string, is too long, or a setting is invalid
        """
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **settings)[0]
        for sentence in (sentences := [sentences] if isinstance(sentences, (bytes, type(None))) else list(sentences)):
            if not isinstance(sentence, str):
                raise UsageError(f"a sentence is of type {type(sentence).__name__}; it must be a string")
        rows = [self.encode(sentence) for sentence in sentences]
        self._warn_of_unknown(rows)
        found = self.generate(rows, beam, verbose, **settings)
        return [self.decode(hypotheses[0]["tokens"]) if hypotheses else "" for hypotheses in found]

    def _warn_of_unknown(self, rows: list[Tensor]) -> None:
        """Warn if most tokens are unknown, or any if the interface has no sub-words, but the model has."""
        unknown = sum(int(row.eq(self.src_dict.unk()).sum()) for row in rows)
        total = sum(len(row) - 1 for row in rows)  # without end-of-sentence
        needs_parts = self.bpe is None and any(map(is_part, self.src_dict.symbols))
        if unknown > (0 if needs_parts else total / 2):
            problem = f"{unknown:,} of {total:,} tokens of the text are unknown to the model"
            logger.warning(f"{problem}; check its language, and tokenizer=, bpe= and bpe_codes= of from_pretrained()")

    def score(self, *args: Any, **settings: Any):
        """Reject the scoring of sentences, which fairseq supports only for language models.

        Raises:
            UsageError: always
        """
        raise UsageError(f"score() is not supported with translation models; {UNSUPPORTED['score_reference']}")

    def generate(
        self, tokenized_sentences, beam: int = 5, verbose: bool = False, skip_invalid_size_inputs: bool = False,
        inference_step_args: dict[str, Any] | None = None, prefix_allowed_tokens_fn: Any = None, **settings: Any,
    ):  # fmt: skip
        """Return the hypotheses of each sentence, tokens with end-of-sentence; none for one that is skipped.

        Raises:
            UsageError: a sentence is too long, or a setting is invalid
        """
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            return self.generate(tokenized_sentences[None], beam, verbose, skip_invalid_size_inputs,
                                 inference_step_args, prefix_allowed_tokens_fn, **settings)[0]  # fmt: skip
        _check_settings(beam, settings)
        rows = [torch.as_tensor(row, dtype=torch.long) for row in tokenized_sentences]
        found: list[list[dict[str, Tensor]]] = [[] for _ in rows]
        limit, used = self.max_positions[0], []
        for number, row in enumerate(rows):
            if not row.ne(self.src_dict.eos()).any():
                found[number] = [self._empty()]
            elif len(row) <= limit:
                used.append(number)
            elif not skip_invalid_size_inputs:
                problem = f"sentence {number + 1} has {len(row)} tokens, more than the model's {limit} positions"
                raise UsageError(f"{problem}; split it, or set skip_invalid_size_inputs=True")
        results = super().generate([rows[number] for number in used], beam, verbose, False, inference_step_args,
                                   prefix_allowed_tokens_fn, **settings) if used else []  # fmt: skip
        for number, hypotheses in zip(used, results):
            found[number] = hypotheses
        return found

    def _empty(self) -> dict[str, Tensor]:
        """Return the hypothesis of an empty sentence."""
        zero = torch.zeros(1, device=self.device)
        return {"tokens": torch.tensor([self.tgt_dict.eos()], device=self.device), "score": zero[0],
                "attention": torch.empty(0), "alignment": torch.empty(0), "positional_scores": zero}  # fmt: skip


def _check_settings(beam: Any, settings: dict[str, Any]) -> None:
    check_settings({"beam": beam, **settings})
    for name, value in settings.items():
        if name in UNSUPPORTED and value not in (None, False):
            raise UsageError(f"{name} is not supported with translate(); {UNSUPPORTED[name]}")
