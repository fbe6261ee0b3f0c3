"""Checks of texts to score: sub-words, logs and other text that gives a score without meaning."""

import re
import sys
from collections.abc import Sequence

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.language_codes import tokenizer_language
from fairseq_deep.tools.generated import Sentences

MARKS = (
    (re.compile("@@( |$)"), "sub-word marks (@@)", "join sub-words first (fairseq-generate --remove-bpe)"),
    (re.compile("\u2581"), "pieces of SentencePiece", "join them first (fairseq-generate --remove-bpe sentencepiece)"),
    (re.compile("<<unk>>"), "unknown words (<<unk>>)", "give the text before fairseq-preprocess with --ref"),
    (re.compile(r"[STHDP]-\d+\t"), "the format of fairseq-generate's output", "give the file with --generate-output"),
    (re.compile(r'\{"line": \d'), "JSON", "translate without --json"),
)
"""Text that is not to be scored, its description, and the fix."""
SHARE = 0.1
"""Share of lines above which a mark is an error; below, lines may be about the mark."""
UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
"""Characters of languages that write no blanks: Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese."""


def check_texts(hypotheses: tuple[str, list[str]], references: Sequence[tuple[str, list[str]]], measure: str,
                lang: str) -> None:  # fmt: skip
    """Reject texts that are not suitable, or warn if few lines are concerned.

    Args:
        hypotheses, references: the origin of each text, and its lines
        measure: see `score.MEASURES`
        lang: target language; "" if it is not given

    Raises:
        UsageError: with the origin, the problem and the fix
    """
    for origin, lines in (hypotheses, *references):
        for mark, name, fix in MARKS:
            count = sum(mark.search(line) is not None for line in lines)
            problem = f"{origin}: {count} of {len(lines)} lines have {name}; {fix}"
            if count > SHARE * len(lines):
                raise UsageError(problem)
            if count:
                warn(problem)
    for reference in references:
        _check_tokenised(hypotheses, reference, measure)
        if measure == "sacrebleu" and not lang:
            _check_blanks(*reference)


def _check_tokenised(hypotheses: tuple[str, list[str]], reference: tuple[str, list[str]], measure: str) -> None:
    """Reject tokenised hypotheses of other references, and warn about other tokenised text for sacreBLEU.

    Text is tokenised if over a quarter of the lines ends in " .". Hypotheses without it can come from a poor model.
    """
    sides = {"hypotheses": hypotheses, "references": reference}
    ends = {side: sum(line.endswith(" .") for line in lines) for side, (_, lines) in sides.items()}
    least = max(2, len(reference[1]) / 4)
    if ends["hypotheses"] > least > 10 * ends["references"]:
        raise UsageError(
            f"{hypotheses[0]} is tokenised ({ends['hypotheses']} lines end in ' .'), but {reference[0]} is not; "
            "detokenise it (with --generate-output: --detokenize LANG), or tokenise both and add --tokenized"
        )
    for side, count in ends.items() if measure == "sacrebleu" else ():
        if count > least:
            warn(f"{count} {side} end in ' .': detokenise tokenised text first (or use --tokenized)")


def _check_blanks(origin: str, lines: list[str]) -> None:
    """Reject text without blanks if no language selects a tokenizer: its lines would be single words."""
    found, total = (sum(map(len, parts)) for parts in zip(*((UNSPACED.findall(x), "".join(x.split())) for x in lines)))
    if 2 * found > total:
        raise UsageError(
            f"{origin} has text without blanks between words; add --lang with the target language, such as zh, ja or th"
        )


def check_decoded(path: str, sentences: Sentences) -> None:
    """Reject an output whose D- lines have lost their blanks: SentencePiece has been decoded twice.

    Raises:
        UsageError: this holds for more than half of the hypotheses with blanks
    """
    spaced = [kinds for kinds in sentences.values() if "D" in kinds and " " in kinds.get("H", "").strip()]
    spaced = [kinds for kinds in spaced if not UNSPACED.search(kinds["H"]) and "\u2581" not in kinds["H"]]
    if 2 * sum(kinds["D"] == kinds["H"].replace(" ", "") for kinds in spaced) > len(spaced):
        raise UsageError(
            f"{path}: the D- lines have no blanks, since SentencePiece was decoded twice; generate again with either "
            "--bpe sentencepiece or --remove-bpe sentencepiece"
        )


def check_score(origin: str, bleu: float) -> None:
    """Warn if translations have almost nothing in common with their references."""
    if bleu < 1:
        warn(f"{origin} has a BLEU of {bleu:.2f}: its lines must be in the order and the language of the references")


def target_language(lang: str | None, detokenize: str | None) -> str:
    """Return the target language that selects sacreBLEU's tokenizer."""
    return lang or (detokenize if detokenize and tokenizer_language(detokenize) else "") or ""


def warn(message: str) -> None:
    """Write a warning to stderr."""
    print(f"fairseq-deep score: warning: {message}", file=sys.stderr)
