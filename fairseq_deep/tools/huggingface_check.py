"""Comparison of an export for transformers with its model: token indices, logits and translations."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.runtime.text import TAG, joined
from fairseq_deep.runtime.verification import DRAWN, LONGEST, Report, batches, padded
from fairseq_deep.tools import UsageError
from fairseq_deep.tools.huggingface_format import EOS, PAD, longest

SHARE, LENPEN = 0.98, 0.6
"""Share of translations that must be equal, and minimum length penalty of this check. With smaller penalties, the
searches differ: transformers compares all hypotheses that end at the same step, and fairseq stops at the first ones."""


def random_texts(source: Any, kind: str | None) -> list[str]:
    """Return tokenised text of random entries of the dictionary *source*, without tags, identical at each call.

    Args:
        kind: kind of sub-words, as in `TextSteps`
    """
    draws, words = random.Random(1), [symbol for symbol in source.symbols[4:] if not TAG.fullmatch(symbol)]
    lines = [draws.choices(words, k=draws.randint(2, LONGEST)) for _ in range(DRAWN)]
    return [joined(" ".join(line), kind or "subword-nmt") for line in lines]


def encode(
    tokenizer: Any, texts: Sequence[str], cut: Any, source: Any, meanings: Sequence[int], unigram: bool = False
) -> tuple[list[list[int]], int]:
    """Return the ids of tokenised *texts* from transformers' tokenizer, and the number of texts with other tie-breaks.

    Args:
        cut: the function from words to sub-words; None: tokens are words
        source: the dictionary
        meanings: see `make_vocabulary`
        unigram: whether the sub-words are SentencePiece's unigram model. It sums scores in single precision, so
            rounding decides between orders of the same pieces

    Raises:
        UsageError: the ids differ from fairseq's tokens
    """
    rows, ties = tokenizer(list(texts)).input_ids, 0
    for text, row in zip(texts, rows):
        expected = source.encode(cut(text) if cut else text).tolist()
        found = [index if index < len(source) else meanings[index - len(source)] for index in row]
        if found != expected and not (unigram and sorted(found) == sorted(expected)):
            raise UsageError(f"the tokenizer for transformers splits a sentence differently ({text[:60]!r})")
        ties += found != expected
    return rows, ties


def check_export(
    folder: str,
    model: Any,
    search: dict[str, Any],
    rows: Sequence[list[int]],
    plain: Sequence[list[int]],
    real: bool,
    tolerance: float,
) -> Report:
    """Compare the export in *folder* with its *model*.

    Args:
        search: "beam", "lenpen", "max_len_a" and "max_len_b"
        rows, plain: the sentences as ids of transformers' tokenizer, and as indices of the dictionary
        real: whether the sentences are real; then translations are also compared
        tolerance: tolerance of logits, relative to the largest one if that is above 1

    Raises:
        UsageError: the results differ by more than rounding
    """
    from transformers import AutoModelForSeq2SeqLM

    other = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
    decoding = BeamSearch([copy.deepcopy(model).prepare_for_decoding()], SearchOptions(**search))
    difference, equal, order = 0.0, 0, sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    for numbers in batches(order):
        theirs, ours = (padded([found[number] for number in numbers]) for found in (rows, plain))
        found = [hypotheses[0]["tokens"].tolist() for hypotheses in decoding(ours)]
        difference = max(difference, compare_logits(model, other, ours, theirs, found, tolerance))
        if real:
            limit = longest(search, theirs.size(1), model.decoder.max_positions())
            output = other.generate(input_ids=theirs, attention_mask=theirs.ne(PAD), max_new_tokens=limit)
            equal += sum(_ended(row) == [*own] for row, own in zip(output.tolist(), found))
    report = Report("logits", len(rows), difference, equal if real else None)
    differing = report.differing(SHARE) if search["lenpen"] >= LENPEN else ""
    if differing:
        raise UsageError(f"transformers' translations differ for {differing}")
    return report


def _ended(row: list[int]) -> list[int]:
    """Return the generated tokens, from the second token to the end of the sentence."""
    end = row.index(EOS, 1) + 1 if EOS in row[1:] else len(row)
    return row[1:end]


@torch.no_grad()
def compare_logits(
    model: Any, other: Any, ours: Tensor, theirs: Tensor, targets: list[list[int]], tolerance: float = 1e-5
) -> float:
    """Return the maximum difference of logits, given the *targets*.

    Args:
        model, other: the `Transformer`, and transformers' model
        ours, theirs: the sources for each of them, B x S
        targets: tokens of the target sentences
        tolerance: see `check_export`

    Raises:
        UsageError: the difference is larger than rounding
    """
    inputs = padded([[EOS, *target[:-1]] for target in targets])
    expected = model(ours, None, inputs)[0].float()
    whole = {"decoder_input_ids": inputs, "use_cache": False}  # with a cache, FSMT does not mask later positions
    found = other(input_ids=theirs, attention_mask=theirs.ne(PAD), **whole).logits
    words = inputs.ne(PAD)
    expected, found = expected[words], found[..., : expected.size(-1)][words]
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= tolerance * max(1.0, scale):
        raise UsageError(f"transformers' logits differ (by {difference:.1e})")
    return difference
