"""The output of ``fairseq-generate``: its S-, T-, H-, D- and A- lines."""

import re

from fairseq_deep.runtime.records import numeral
from fairseq_deep.tools import UsageError, read_lines

LINE = re.compile(r"([STHDA])-(\d+)(?:\t|$)")
LONGEST = 9
"""Most digits of a sentence number."""

Sentences = dict[int, dict[str, str]]


def read_generated(path: str) -> Sentences:
    """Return kind of line -> text, by sentence number; the first of several hypotheses, which is the best.

    Raises:
        UsageError: the file cannot be read, a number is wrong, or there is no hypothesis
    """
    sentences = parse_generated(read_lines(path), path)
    if not any("H" in kinds for kinds in sentences.values()):
        raise UsageError(f"{path} has no line 'H-...'; give the output of fairseq-generate, run without --quiet")
    return sentences


def parse_generated(lines: list[str], path: str) -> Sentences:
    """Return the same for the *lines* of the file *path*, which may have no hypothesis."""
    sentences: Sentences = {}
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
            raise UsageError(f"{path}:{place}: {kind}-{digits} has no score; give what fairseq-generate has written")
        sentences.setdefault(int(digits), {}).setdefault(kind, fields[-1] if len(fields) > 1 + scored else "")
    return sentences


def best(kinds: dict[str, str]) -> str:
    """Return the hypothesis of a sentence.

    The D- line, after ``--bpe`` and ``--tokenizer``, comes before the H- line: the T- line has been through these, too.
    """
    return kinds.get("D", kinds["H"])
