"""Parser of the output of ``fairseq-generate``: S-, T-, H-, D- and A- lines."""

import re

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import numeral
from fairseq_deep.tools.input_text import read_lines

LINE = re.compile(r"([STHDA])-(\d+)(?:\t|$)")
LONGEST = 9
"""Maximum number of digits in a sentence number."""

Sentences = dict[int, dict[str, str]]


def read_generated(path: str) -> Sentences:
    """Return {sentence number: {kind of line: text}}; of several hypotheses, the one with the best score is used.

    Raises:
        UsageError: the file cannot be read, a number is invalid, there is no hypothesis, or there are several runs
    """
    sentences = parse_generated(read_lines(path), path)
    if not any("H" in kinds for kinds in sentences.values()):
        raise UsageError(f"{path} has no line 'H-...'; give the output of fairseq-generate without --quiet")
    return sentences


def parse_generated(lines: list[str], path: str) -> Sentences:
    """Parse the *lines* of the file *path* like :func:`read_generated`; hypotheses may be missing."""
    sentences: Sentences = {}
    scores: dict[tuple[str, int], float] = {}
    last: dict[str, int] = {}
    for place, line in enumerate(lines, 1):
        match = LINE.match(line)
        if not match:
            continue
        kind, digits = match.groups()
        if len(digits) > LONGEST:
            raise UsageError(f"{path}:{place}: the sentence number has {len(digits)} digits; remove the line")
        scored = kind in "HD"
        fields = line.split("\t", 1 + scored)
        if scored and (len(fields) < 2 or not numeral(fields[1].strip())):
            raise UsageError(f"{path}:{place}: {kind}-{digits} has no score; give the output of fairseq-generate")
        number = int(digits)
        kinds = sentences.setdefault(number, {})
        if kind in kinds and (kind in "ST" or last[kind] != number):
            problem = f"{path}:{place}: sentence {number} has a {kind}- line already (several runs in one file?)"
            raise UsageError(f"{problem}; give the output of one run")
        last[kind], score = number, float(fields[1]) if scored else 0.0
        if kind not in kinds or score > scores[kind, number]:
            kinds[kind], scores[kind, number] = fields[-1] if len(fields) > 1 + scored else "", score
    return sentences


def best(kinds: dict[str, str]) -> str:
    """Return the hypothesis of a sentence.

    The D- line has priority over the H- line: ``--bpe`` and ``--tokenizer`` change it in the same way as the T- line.
    """
    return kinds.get("D", kinds["H"])
