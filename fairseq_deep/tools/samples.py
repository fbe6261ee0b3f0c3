"""Translations of a recipe's test set to look at: evenly spread over it, with their alignments where there are any."""

import os
import re
from typing import Any

from fairseq_deep.tools import UsageError, read_lines
from fairseq_deep.tools.generated import Sentences, best, read_generated

LINKS = re.compile(r"(\d{1,6}-\d{1,6})( \d{1,6}-\d{1,6})*")
WIDEST = 40  # tokens of a sentence whose alignment is still drawn


def choose(folder: str, flags: dict[str, str], count: int, generated: str | None = None) -> dict[str, Any]:
    """Choose at most *count* sentences of the experiment in *folder*, by their place in the test set.

    Args:
        flags: of its training
        generated: the output of ``fairseq-generate`` to take them from; None: what the recipe has scored

    Returns:
        ``sentences``, how many there are, and ``samples``, a dictionary for each chosen one, with ``line`` (from 1),
        ``source``, ``ours``, ``reference``, ``chrf`` (of the sentence, None without sacrebleu) and ``alignment`` (None,
        or tokens of both sides with the set of linked pairs)
    """
    languages = flags.get("source-lang"), flags.get("target-lang")
    found = from_output(generated) if generated else _from_recipe(folder, *languages)
    chosen = found if len(found) <= count else [found[index * len(found) // count] for index in range(count)]
    for sentence in chosen:
        sentence["chrf"] = _chrf(sentence["ours"], sentence["reference"])
    return {"samples": chosen, "sentences": len(found)}


def _from_recipe(folder: str, source: str | None, target: str | None) -> list[dict[str, Any]]:
    translations = os.path.join(folder, f"test.hyp.{target}")
    if not os.path.isfile(translations):
        return []
    raw, pieces = (os.path.join(folder, "text", kind, f"test.{source}") for kind in ("raw", "bpe"))
    sources = read_lines(raw if os.path.isfile(raw) else pieces)
    sides = [sources, read_lines(translations), read_lines(os.path.join(folder, f"test.ref.{target}"))]
    if len({*map(len, sides)}) != 1:
        raise UsageError(f"{folder}: its test set and translations differ in length: run again with --stage 6")
    alignments = _alignments(os.path.join(folder, "generate-test.txt"))
    names = ("source", "ours", "reference")
    return [
        {"line": line, **dict(zip(names, texts)), "alignment": alignments.get(line)}
        for line, texts in enumerate(zip(map(_joined, sides[0]), *sides[1:]), 1)
    ]


def from_output(path: str) -> list[dict[str, Any]]:
    """The sentences of an output of ``fairseq-generate``, by their numbers."""
    sentences = read_generated(path)
    alignments = _aligned(sentences)
    return [
        {
            "line": number + 1,
            "source": _joined(kinds.get("S", "")),
            "ours": _joined(best(kinds)),
            "reference": _joined(kinds.get("T", "")),
            "alignment": alignments.get(number + 1),
        }
        for number, kinds in sorted(sentences.items())
        if "H" in kinds
    ]


def _alignments(path: str) -> dict[int, dict[str, Any]]:
    return _aligned(read_generated(path)) if os.path.isfile(path) else {}


def _aligned(sentences: Sentences) -> dict[int, dict[str, Any]]:
    """Line -> tokens of both sides and their links (source, target).

    Alignments count sub-words. Where ``--remove-bpe`` has joined these, their numbers point past the words that are
    left, or at others: they are taken only if every token of the hypothesis has its link, and no other.
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


def _joined(line: str) -> str:
    """The words of subword-nmt's pieces."""
    return re.sub(r"@@( |$)", "", line)


def _chrf(ours: str, reference: str) -> float | None:
    try:
        from sacrebleu.metrics import CHRF
    except ImportError:
        return None
    return CHRF().sentence_score(ours, [reference]).score
