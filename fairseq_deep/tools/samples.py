"""Sample translations of a recipe's test set, evenly distributed over it, with alignments if available."""

import os
import re
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.text import joined
from fairseq_deep.tools.generated import Sentences, best, read_generated
from fairseq_deep.tools.input_text import read_lines

LINKS = re.compile(r"(\d{1,6}-\d{1,6})( \d{1,6}-\d{1,6})*")
SUBWORDS = "subword-nmt"
WIDEST = 40  # maximum length of sentences with a drawn alignment, in tokens


def choose(folder: str, flags: dict[str, str], count: int, generated: str | None = None) -> dict[str, Any]:
    """Choose at most *count* sentences of the experiment in *folder*, by their position in the test set.

    Args:
        flags: flags of its training run
        generated: output of ``fairseq-generate`` with the sentences; None: the recipe's translations

    Returns:
        ``sentences``, the total number, and ``samples``, a dictionary per chosen sentence with ``line`` (from 1),
        ``source``, ``ours``, ``reference``, ``chrf`` (of the sentence) and ``alignment`` (None,
        or tokens of both sides with the set of linked pairs)
    """
    from sacrebleu.metrics import CHRF

    languages = flags.get("source-lang"), flags.get("target-lang")
    found = from_output(generated) if generated else _from_recipe(folder, *languages)
    chosen = found if len(found) <= count else [found[index * len(found) // count] for index in range(count)]
    for sentence in chosen:
        sentence["chrf"] = CHRF().sentence_score(sentence["ours"], [sentence["reference"]]).score
    return {"samples": chosen, "sentences": len(found)}


def _from_recipe(folder: str, source: str | None, target: str | None) -> list[dict[str, Any]]:
    translations = os.path.join(folder, f"test.hyp.{target}")
    if not os.path.isfile(translations):
        return []
    raw, pieces = (os.path.join(folder, "text", kind, f"test.{source}") for kind in ("raw", "bpe"))
    sources = read_lines(raw if os.path.isfile(raw) else pieces)
    sides = [sources, read_lines(translations), read_lines(os.path.join(folder, f"test.ref.{target}"))]
    if len({*map(len, sides)}) != 1:
        raise UsageError(f"{folder}: test set and translations differ in length: run again with --stage 6")
    output = os.path.join(folder, "generate-test.txt")
    alignments = _aligned(read_generated(output)) if os.path.isfile(output) else {}
    names = ("source", "ours", "reference")
    return [
        {"line": line, **dict(zip(names, texts)), "alignment": alignments.get(line)}
        for line, texts in enumerate(zip((joined(line, SUBWORDS) for line in sides[0]), *sides[1:]), 1)
    ]


def from_output(path: str) -> list[dict[str, Any]]:
    """Return the sentences of an output of ``fairseq-generate``, ordered by number."""
    sentences = read_generated(path)
    alignments = _aligned(sentences)
    return [
        {
            "line": number + 1,
            "source": joined(kinds.get("S", ""), SUBWORDS),
            "ours": joined(best(kinds), SUBWORDS),
            "reference": joined(kinds.get("T", ""), SUBWORDS),
            "alignment": alignments.get(number + 1),
        }
        for number, kinds in sorted(sentences.items())
        if "H" in kinds
    ]


def _aligned(sentences: Sentences) -> dict[int, dict[str, Any]]:
    """Return {line: tokens of both sides and their links (source, target)}.

    Alignments are indices of sub-words. If ``--remove-bpe`` has joined the sub-words, these indices are wrong.
    Therefore an alignment is used only if each token of the hypothesis has a link, and no other index occurs.
    """
    found = {}
    for number, kinds in sentences.items():
        if not {"A", "S", "H"} <= kinds.keys() or not LINKS.fullmatch(kinds["A"]):
            continue
        source, target = kinds["S"].split(), kinds["H"].split()
        links = {tuple(map(int, pair.split("-"))) for pair in kinds["A"].split()}
        linked = {column for _, column in links}
        fits = linked == {*range(len(target))} and max(row for row, _ in links) < len(source)
        if fits and max(len(source), len(target)) <= WIDEST:
            found[number + 1] = {"source": source, "target": target, "links": links}
    return found
