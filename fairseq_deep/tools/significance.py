"""Significance tests between systems: sacreBLEU's paired bootstrap (Koehn, 2004) and its input."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.tables import format_table

SEED = 12345  # sacreBLEU's default
RESAMPLES = 1000


class Measured(NamedTuple):
    """sacreBLEU's results for several systems and one measure.

    Attributes:
        signature: signature, including the number of resamples and the seed
        systems: per system "score", "mean" and "ci" (mean of the resamples, and half of the 95 % interval around it),
            and "p" (None for the first system)
    """

    signature: str
    systems: list[dict[str, float | None]]


def paired_bootstrap(
    systems: Sequence[tuple[str, list[str]]],
    references: list[list[str]],
    metrics: dict[str, Any],
    resamples: int = RESAMPLES,
) -> dict[str, Measured]:
    """Compare the first of `systems` (name, hypotheses) with each other one.

    Args:
        references: one list per set of references.
        metrics: new sacreBLEU metrics, by the names of the results.
    """
    from sacrebleu.significance import PairedTest

    with _quiet_sacrebleu():
        signatures, scores = PairedTest(systems, metrics, references, "bs", resamples)()
    measured = {}
    for name, (key, signature) in zip(metrics, signatures.items()):
        found, first = [], scores[key][0]
        for (_, lines), each in zip(systems, scores[key]):
            # sacreBLEU's formula gives a tiny p for equal scores
            equal = each is not first and (lines == systems[0][1] or each.score == first.score)
            p = 1.0 if equal else each.p_value and float(each.p_value)
            found.append({"score": float(each.score), "mean": float(each.mean), "ci": float(each.ci), "p": p})
        measured[name] = Measured(str(signature), found)
    return measured


@contextlib.contextmanager
def _quiet_sacrebleu() -> Iterator[None]:
    """Fix the seed, which sacreBLEU reads from the environment, and suppress its progress messages."""
    logger, name = logging.getLogger("sacrebleu"), "SACREBLEU_SEED"
    level, seed = logger.level, os.environ.get(name)
    logger.setLevel(logging.ERROR)
    os.environ[name] = str(SEED)
    try:
        yield
    finally:
        logger.setLevel(level)
        del os.environ[name]
        if seed is not None:
            os.environ[name] = seed


def read_run(folder: str, lang: str = "") -> tuple[list[str], list[list[str]]]:
    """Return a recipe's translations of the test set in `folder`, and its sets of references."""
    names = os.listdir(folder)
    languages = sorted(name[len("test.hyp.") :] for name in names if name.startswith("test.hyp."))
    if lang in languages:
        languages = [lang]
    if len(languages) > 1:
        raise UsageError(f"{folder} has translations into {', '.join(languages)}; choose one with --lang")
    if not languages:
        seeds = sorted((name for name in names if re.fullmatch(r"seed\d+", name)), key=lambda name: int(name[4:]))
        if seeds:
            raise UsageError(f"{folder} has several seeds; give one, such as {os.path.join(folder, seeds[0])}")
        raise UsageError(f"{folder} has no test.hyp.LANG; give a finished run of a recipe, or a file")
    first = f"test.ref.{languages[0]}"
    if first not in names:
        raise UsageError(f"{folder} has no {first} for its translations; score that run again (--stage 7)")
    more = [f"test.ref{number}.{languages[0]}" for number in range(1, len(names))]
    files = [first, *(name for name in more if name in names)]
    references = [read_lines(os.path.join(folder, name)) for name in files]
    return read_lines(os.path.join(folder, f"test.hyp.{languages[0]}")), references


def read_other(path: str, references: list[list[str]], lang: str = "") -> list[str]:
    """Return the hypotheses of a run or a file, which must be translations of the same sentences."""
    if not os.path.isdir(path):
        hypotheses = read_lines(path)
    else:
        hypotheses, others = read_run(path, lang)
        if len(others) != len(references):
            counts = f"{path} was scored with {len(others)} set(s) of references, not {len(references)}"
            raise UsageError(f"{counts}; score both systems with the same references")
        if others != references:
            pairs = enumerate(zip(zip_longest(*others), zip_longest(*references)), 1)
            line = next((number for number, (a, b) in pairs if a != b), min(map(len, (*others, *references))) + 1)
            raise UsageError(f"{path} has other references (line {line}); score both systems on the same test set")
    if len(hypotheses) != len(references[0]):
        counts = f"{path} has {len(hypotheses)} sentences, but the references {len(references[0])}"
        raise UsageError(f"{counts}; translate the same test set with both systems")
    return hypotheses


def table(compared: dict[str, Measured], systems: Sequence[str]) -> str:
    """Format the results of each measure, a row per system; difference and p are to the first."""
    rows = [("", "system", "score", "95 % interval", "difference", "p")]
    for measure, (_, found) in compared.items():
        for number, (system, each) in enumerate(zip(systems, found)):
            tested = (f"{each['score'] - found[0]['score']:+.2f}", f"{each['p']:.3f}") if number else ("", "")
            interval = f"{each['mean']:.2f} ± {each['ci']:.2f}"
            rows.append((measure * (number == 0), system, f"{each['score']:.2f}", interval, *tested))
    return format_table(rows, right=(2, 3, 4, 5))
