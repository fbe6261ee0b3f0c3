"""Checks for ``--eval-bleu`` settings that would fail at the first validation."""

import argparse
import functools
import json
from typing import Any

from fairseq.data import data_utils, encoders
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.bleu import bleu_for
from fairseq_deep.plugin.generation_settings import check_settings
from fairseq_deep.runtime.language_codes import TOKENIZERS, short_code

OTHER_OUTPUT = ("constraints", "score_reference", "print_alignment")


def check_evaluation(flags: Any) -> None:
    """Check the search settings of ``--eval-bleu``.

    Raises:
        UsageError: a setting is invalid; the message names the setting and the fix
    """
    if not getattr(flags, "eval_bleu", False):
        return
    _check_text(flags)
    if getattr(flags, "target_lang", None) and not getattr(flags, "eval_tokenized_bleu", False):
        bleu_for(flags.target_lang)  # its package is checked before training
    given = _read(flags, "eval_bleu_args")
    try:
        check_settings(given)
    except UsageError as error:
        raise _refuse(error.message) from None
    for name in OTHER_OUTPUT:
        if given.get(name):
            raise _refuse(f"{name} is not supported during validation; omit it")
    shortest = int(given.get("max_len_a", 0) * 2 + given.get("max_len_b", 200))  # of a word and the end of sentence
    if shortest < max(given.get("min_len", 1), 1):
        raise _refuse(f"max_len_a and max_len_b limit short sentences to {shortest} tokens; use a higher max_len_b")
    if given.get("nbest", 1) > given.get("beam", 5):
        raise _refuse(f"nbest exceeds beam ({given['nbest']}); use a larger beam")
    strategies = [name for name in ("sampling", "match_source_len") if given.get(name)]
    strategies += [name for name in ("diverse_beam_groups", "diversity_rate") if given.get(name, -1) > 0]
    if len(strategies) > 1:
        raise _refuse(f"{' and '.join(strategies)} exclude each other; use one of them")
    groups = given.get("diverse_beam_groups", -1)
    if groups > 0 and given.get("beam", 5) % groups:
        raise _refuse(f"diverse_beam_groups does not divide beam ({groups}); change one of them")


_stock_inference_with_bleu = TranslationTask._inference_with_bleu


def inference_with_bleu(self, generator: Any, sample: Any, model: Any) -> Any:
    """Score with sacreBLEU's tokenizer of the target language; fairseq uses 13a, which gives Chinese a BLEU of 0."""
    import sacrebleu

    stock, tokenizer = sacrebleu.corpus_bleu, TOKENIZERS.get(short_code(self.cfg.target_lang or ""), "13a")
    sacrebleu.corpus_bleu = functools.partial(stock, tokenize=tokenizer)
    try:
        return _stock_inference_with_bleu(self, generator, sample, model)
    finally:
        sacrebleu.corpus_bleu = stock


def _check_text(flags: Any) -> None:
    """Reject a detokeniser or a removal of sub-words that this fairseq does not support."""
    name, options = getattr(flags, "eval_bleu_detok", None), _read(flags, "eval_bleu_detok_args")
    try:
        encoders.build_tokenizer(argparse.Namespace(tokenizer=name, **options))
    except Exception as error:
        known = ", ".join(sorted(encoders.TOKENIZER_REGISTRY))
        problem = f"cannot build {name} ({type(error).__name__}: {error}); use one of {known}"
        raise _refuse(problem, "eval_bleu_detok") from error
    symbol = getattr(flags, "eval_bleu_remove_bpe", None)
    try:
        data_utils.post_process("", symbol)
    except NotImplementedError as error:
        problem = f"unknown kind of sub-words ({symbol}); use @@ or sentencepiece"
        raise _refuse(problem, "eval_bleu_remove_bpe") from error


def _refuse(problem: str, flag: str = "eval_bleu_args") -> UsageError:
    return UsageError(f"--{flag.replace('_', '-')}: {problem}")


def _read(flags: Any, flag: str) -> dict[str, Any]:
    text = getattr(flags, flag, None) or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(f"not JSON ({text}); use '{{\"beam\": 4}}'", flag) from error
    if not isinstance(value, dict):
        raise _refuse(f"not a JSON object ({text}); use '{{\"beam\": 4}}'", flag)
    return value
