"""Scores of one model for many language pairs, aggregated as in Zhang et al. (2020) for OPUS-100.

A directory has ``test.SRC-TGT.hyp`` and ``test.SRC-TGT.ref`` per pair. sacreBLEU scores all pairs with the same
tokenisation (13a, also for Chinese, as in the papers). The other scores are means over pairs: from English, to English,
and zero-shot (neither). BLEU4 is the mean over German, Chinese, Breton and Telugu.
"""

import os
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.tables import format_table

PAIR = re.compile(r"test\.([a-z]{2,3})-([a-z]{2,3})\.hyp")
FOUR = ("de", "zh", "br", "te")
DIRECTIONS = ("en-xx", "xx-en", "zero-shot")


def score_folder(folder: str, metric: Any, against: str | None = None) -> dict[str, Any]:
    """Return BLEU per pair, and means over pairs.

    Args:
        metric: sacreBLEU's BLEU
        against: directory of another system, for the win ratio: the share of pairs with a strictly better score of ours
    """
    texts = read_folder(folder)
    scores = {pair: metric.corpus_score(ours, [references]).score for pair, (ours, references) in texts.items()}
    others = _other_scores(against, texts, metric) if against else {}
    directions = {}
    for name in DIRECTIONS:
        pairs = [pair for pair in scores if direction(pair) == name]
        if pairs:
            directions[name] = _summary(name, pairs, scores, others, texts)
    supervised = [score for pair, score in scores.items() if direction(pair) != "zero-shot"]
    return {
        "measure": "multilingual",
        "label": "sacreBLEU of each pair, and means over pairs",
        "bleu": statistics.fmean(supervised or scores.values()),
        "signature": str(metric.get_signature()),
        "directions": directions,
        "pairs": dict(sorted(scores.items())),
        **({"against": {"system": against, "pairs": others}} if against else {}),
    }


def direction(pair: str) -> str:
    """Return the entry of `DIRECTIONS` for a pair such as ``en-de``."""
    source, target = map(short_code, pair.split("-"))
    return "en-xx" if source == "en" else "xx-en" if target == "en" else "zero-shot"


def read_folder(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return hypotheses and references of each pair."""
    if not os.path.isdir(folder):
        raise UsageError(f"--multilingual {folder}: no such directory; correct the path")
    pairs = sorted(f"{match[1]}-{match[2]}" for match in map(PAIR.fullmatch, os.listdir(folder)) if match)
    if not pairs:
        raise UsageError(f"{folder} has no test.SRC-TGT.hyp, such as test.en-de.hyp; give one per pair")
    texts = {}
    for pair in pairs:
        paths = [os.path.join(folder, f"test.{pair}.{kind}") for kind in ("hyp", "ref")]
        sides = [read_lines(path) for path in paths]
        if len(sides[0]) != len(sides[1]):
            counts = f"{paths[0]} has {len(sides[0])}, {paths[1]} has {len(sides[1])}"
            raise UsageError(f"line counts differ: {counts}; align the files")
        texts[pair] = (sides[0], sides[1])
    return texts


def _other_scores(folder: str, texts: dict[str, tuple[list[str], list[str]]], metric: Any) -> dict[str, float]:
    others, found = read_folder(folder), {}
    missing = sorted(set(texts) - set(others))
    if missing:
        first = ", ".join(missing[:3])
        raise UsageError(f"{folder} has no translations of {first}; score both systems on the same pairs")
    for pair, (_, references) in texts.items():
        if others[pair][1] != references:
            raise UsageError(f"{folder} has other references for {pair}; score both systems on the same test sets")
        found[pair] = metric.corpus_score(others[pair][0], [references]).score
    return found


def _summary(name: str, pairs: Sequence[str], scores: Any, others: Any, texts: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"pairs": len(pairs), "bleu": statistics.fmean(scores[pair] for pair in pairs)}
    if others:
        found["win_ratio"] = 100 * sum(scores[pair] > others[pair] for pair in pairs) / len(pairs)
    if name == "zero-shot":
        found["language_accuracy"] = language_accuracy({pair: texts[pair][0] for pair in pairs})
    else:
        four = [f"en-{lang}" if name == "en-xx" else f"{lang}-en" for lang in FOUR]
        if set(four) <= set(pairs):
            found["bleu4"] = statistics.fmean(scores[pair] for pair in four)
    return found


def language_accuracy(hypotheses: dict[str, list[str]]) -> float | None:
    """Return the share of hypotheses (%) that py3langid classifies as the target language, averaged over pairs.

    Without py3langid, warn and return None.
    """
    try:
        import py3langid
    except ImportError:
        print("fairseq-deep score: warning: no language accuracy: pip install py3langid", file=sys.stderr)
        return None
    shares = []
    for pair, lines in hypotheses.items():
        target = short_code(pair.split("-")[1])
        shares.append(statistics.fmean(bool(line.strip()) and py3langid.classify(line)[0] == target for line in lines))
    return 100 * statistics.fmean(shares)


def report(result: dict[str, Any]) -> str:
    """Format the means, with a row per direction."""
    heads = {"win_ratio": "win ratio %", "bleu4": "BLEU4", "language_accuracy": "language accuracy %"}
    directions = result["directions"]
    used = [key for key in heads if any(found.get(key) is not None for found in directions.values())]
    rows = [("direction", "pairs", "mean BLEU", *(heads[key] for key in used))]
    for name, found in directions.items():
        cells = ["-" if found.get(key) is None else f"{found[key]:.2f}" for key in used]
        label = f"{name} (BLEU94)" if found["pairs"] == 94 else name
        rows.append((label, str(found["pairs"]), f"{found['bleu']:.2f}", *cells))
    table = format_table(rows, right=range(1, len(rows[0])))
    return f"{table}\nsignature  {result['signature']}\nBLEU = {result['bleu']:.2f}"
