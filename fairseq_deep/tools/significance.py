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
        results: per system `score`, `mean` and `ci` (mean of the resamples, and half of the 95 % interval around it),
            and `p_value`, except for the first system
    """

    signature: str
    results: list[Any]


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
        for (_, lines), result in zip(systems[1:], scores[key][1:]):
            if lines == systems[0][1] or result.score == scores[key][0].score:
                result.p_value = 1.0  # sacreBLEU's formula gives a tiny p for equal scores
        measured[name] = Measured(str(signature), scores[key])
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


def describe(measured: Measured) -> dict[str, Any]:
    """Convert the comparison of two systems, the other one and ours, to a record."""
    other, ours = measured.results
    keys = ("score", "mean", "ci")
    return {
        "other": {key: float(getattr(other, key)) for key in keys},
        "ours": {key: float(getattr(ours, key)) for key in keys},
        "difference": float(ours.score - other.score),
        "p": float(ours.p_value),
        "signature": measured.signature,
    }


def describe_all(names: Sequence[str], found: dict[str, Measured]) -> list[dict[str, Any]]:
    """Convert a comparison of several systems to one record per system; `p` is against the first."""
    records = []
    for name, *results in zip(names, *(measured.results for measured in found.values())):
        values = ({key: float(getattr(each, key)) for key in ("score", "mean", "ci")} for each in results)
        ps = (None if each.p_value is None else float(each.p_value) for each in results)
        records.append({"hypotheses": name} | {key: value | {"p": p} for key, value, p in zip(found, values, ps)})
    return records


def table_of_systems(records: list[dict[str, Any]], measures: Sequence[str]) -> str:
    """Format records of `describe_all`, with one row per system."""
    rows = [("system", *(head for measure in measures for head in (measure, "95 % interval", "p")))]
    for record in records:
        row = [record["hypotheses"]]
        for found in map(record.get, measures):
            p = "-" if found["p"] is None else f"{found['p']:.3f}"
            row += [f"{found['score']:.2f}", f"{found['mean']:.2f} ± {found['ci']:.2f}", p]
        rows.append(tuple(row))
    return format_table(rows, right=range(1, len(rows[0])))


def table(records: dict[str, dict[str, Any]], ours: str, other: str) -> str:
    """Format records of `describe`, with two rows per measure: the other system, then ours."""
    rows = [("", "system", "score", "95 % interval", "difference", "p")]
    for measure, record in records.items():
        last = f"{record['difference']:+.2f}", f"{record['p']:.3f}"
        for words in ((measure, other, "other", "", ""), ("", ours, "ours", *last)):
            found = record[words[2]]
            interval = f"{found['mean']:.2f} ± {found['ci']:.2f}"
            rows.append((*words[:2], f"{found['score']:.2f}", interval, *words[3:]))
    return format_table(rows, right=(2, 3, 4, 5))
