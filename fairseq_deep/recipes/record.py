"""Records of a run's environment (``env.txt``) and results (``RESULT.json``)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import records
from fairseq_deep.tools.input_text import text_of
from fairseq_deep.tools.machine import describe_cpu
from fairseq_deep.tools.output_files import write_text

from .changes import effective, read_command
from .options import ROOT

if TYPE_CHECKING:
    from .recipe import Recipe

PACKAGES = ("fairseq-deep", "fairseq", "torch", "numpy", "sacrebleu", "sacremoses", "subword-nmt")
SPEED = re.compile(r"\(([\d.]+) sentences/s, ([\d.]+) tokens/s\)")
"""The end of fairseq-generate's log."""
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")


def commit() -> str:
    """Return the commit of the repository, marked if there are local changes."""

    words = ["git", "-C", ROOT, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty= + local changes"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def hardware(gpus: int) -> str:
    """Describe the processor, or the GPUs.

    Raises:
        UsageError: torch sees fewer GPUs
    """
    if not gpus:
        return f"{os.cpu_count()} cores, {describe_cpu()[0]}"
    import torch

    seen = torch.cuda.device_count()
    if seen < gpus:
        raise UsageError(
            f"torch {torch.__version__} sees {seen} of {gpus} GPUs: install torch for your CUDA, or use --ngpu {seen}"
        )
    return f"{gpus} x {torch.cuda.get_device_name(0)}"


def write_environment(path: str, gpus: int) -> None:
    """Record versions, commit and hardware."""
    facts = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    facts.update(commit=commit(), system=platform.platform(), hardware=hardware(gpus))
    write_text(path, "".join(f"{key:13} {value}\n" for key, value in facts.items()))


def read_environment(exp: str) -> dict[str, str]:
    """Return the content of ``env.txt``; empty without the file."""
    return dict(line.split(None, 1) for line in text_of(os.path.join(exp, "env.txt")).splitlines())


def read_json(path: str, schema: Any = None) -> dict[str, Any]:
    """Return the content of *path*; empty if the file does not exist."""
    return records.read_json(path, schema or {}, "delete it, then run the same command again")


def read_records(exp: str) -> list[dict[str, Any]]:
    """Return the lines of ``train.jsonl``, except lines that a full disk or a power cut has truncated."""
    return list(records.read_json_lines(os.path.join(exp, "train.jsonl"), records.TRAINED))


def _by_update(lines: list[dict[str, Any]], kind: str, name: str) -> dict[int, dict[str, Any]]:
    """Return the *lines* of a *kind* by update; if a resumed run repeated some, the later ones."""
    return {int(line[name]): line for line in lines if line["kind"] == kind}


def training_facts(exp: str) -> dict[str, Any]:
    """Return updates, epochs, validation perplexities, hours and commits of all sessions, and parameters."""
    lines, facts = read_records(exp), dict[str, Any]()
    valid = _by_update(lines, "valid", "valid_num_updates")
    for update, line in valid.items():
        facts.update(epochs=line["epoch"], updates=update, valid_ppl=float(line["valid_ppl"]))
    if valid:
        facts["best_valid_ppl"] = min(float(line["valid_ppl"]) for line in valid.values())
    if lines:
        sessions = {line["session"]: line["time"] - line["session"] for line in lines}
        facts["train_hours"] = round(sum(sessions.values()) / 3600, 4)
        facts["commit"] = ", ".join(dict.fromkeys(line["commit"] for line in lines if "commit" in line))
    counts = PARAMETERS.findall(text_of(os.path.join(exp, "logs", "4-train.log")))
    facts["parameters"] = int(counts[-1].replace(",", "")) if counts else None
    return facts


def trained_with(exp: str) -> dict[str, Any]:
    """Return the settings that the model was trained with, independent of the current command."""
    flags = effective(read_command(os.path.join(exp, "train.sh")))
    try:
        _, batch, _, devices = text_of(os.path.join(exp, "trained-with.txt")).splitlines()
        count, max_tokens, update_freq = map(int, batch.split())
    except ValueError:
        raise UsageError(f"{exp}/trained-with.txt lacks the settings of training: run again with --stage 4") from None
    precision = [name for name in ("fp16", "bf16", "amp") if f"--{name}" in flags]
    return {
        "devices": devices,
        "arch": flags.get("--arch"),
        "precision": precision[0] if precision else "fp32",
        "seed": int(flags.get("--seed", 1)),
        "max_tokens": max_tokens,
        "update_freq": update_freq,
        "tokens_per_update": count * max_tokens * update_freq,
    }


def read_scores(exp: str, subset: str) -> dict[str, dict[str, Any]]:
    """Return the scores of a set by each procedure."""
    measures = {"sacrebleu": "", "tokenised": "-tokenized", "compound_split": "-compound-split"}
    paths = {name: os.path.join(exp, f"score-{subset}{suffix}.json") for name, suffix in measures.items()}
    return {name: read_json(path, records.SCORE) for name, path in paths.items()}


def result_line(exp: str, system: str = "", command: str = "", seed: int | None = None) -> dict[str, Any]:
    """Return the line of a finished run in ``results.jsonl``.

    Args:
        system: name in the experiment; empty: the architecture
        command: architecture and flags of the system, if known
        seed: the seed; None: as in ``RESULT.json``
    """
    result, lines = read_json(os.path.join(exp, "RESULT.json"), records.RESULT), read_records(exp)
    inner, valid = _by_update(lines, "train_inner", "num_updates"), _by_update(lines, "valid", "valid_num_updates")
    curve = {update: float(valid[update]["valid_loss"]) for update in sorted(valid) if "valid_loss" in valid[update]}
    best = min(curve, key=lambda update: math.inf if math.isnan(curve[update]) else curve[update], default=None)
    speed = _decoding_speed(exp) if "bleu" in result else (None, None)
    # Medians, since an interval with a validation includes its time. Tokens per batch and per second have more digits
    # than updates per second.
    steps = [float(r["wpb"]) / float(r["wps"]) for r in inner.values() if float(r.get("wps", 0)) > 0]
    names = ("updates", "train_hours", "bleu", "chrf", "signature", *records.FACTS, *records.SEARCH)
    return {
        **{name: result[name] for name in names if result.get(name) is not None},
        "system": system or result.get("arch") or "", "seed": result["seed"] if seed is None else seed,
        "command": command,
        "parameters": result.get("parameters"), **_diagnosed(exp),
        **(_losses(valid[best]) if curve else {}),
        "step_seconds": median(steps), "sentences_per_second": speed[0], "tokens_per_second": speed[1],
        "ratio_encoder": median([float(r["ratio_enc"]) for r in inner.values() if r.get("ratio_enc") is not None]),
        "ratio_decoder": median([float(r["ratio_dec"]) for r in inner.values() if r.get("ratio_dec") is not None]),
        "flags": effective(read_command(os.path.join(exp, "train.sh"))),
        "environment": result.get("environment", {}), "curve": {str(update): loss for update, loss in curve.items()},
    }  # fmt: skip


def _losses(line: dict[str, Any]) -> dict[str, float]:
    """Return the losses of a validation, by our names."""
    names = {"valid_loss": "valid_loss", "valid_nll": "valid_nll_loss", "valid_ppl": "valid_ppl"}
    return {ours: float(line[name]) for ours, name in names.items() if name in line}


def _decoding_speed(exp: str) -> tuple[float | None, float | None]:
    """Return sentences and tokens per second of the last translation, from fairseq-generate's log."""
    found = SPEED.findall(text_of(os.path.join(exp, "logs", "6-generate.log")))
    return tuple(map(float, found[-1])) if found else (None, None)


def _diagnosed(exp: str) -> dict[str, Any]:
    """Return the results of ``fairseq-deep diagnose``, if a comparison has run it."""
    models = read_json(os.path.join(exp, "diagnose.json")).get("models")
    if not models:
        return {}
    mean = models[0]["mean"]
    ends = {f"between_{side}": values[-1] for side, values in mean["stream_between"].items() if values}
    return {"source_gain": mean["source_gain"], **ends}


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def read_data(exp: str) -> dict[str, Any]:
    """Return the record of the text; empty without one."""
    return read_json(os.path.join(exp, "text", "raw", "data.json"), records.DATA)


def write_search(exp: str, options: Recipe) -> None:
    """Record the search settings of the translations; a later command of stage 7 can have other options."""
    write_json(os.path.join(exp, records.SEARCHED), _search_of(options))


def read_search(exp: str, options: Recipe) -> dict[str, Any]:
    """Return the search settings of the translations; without a record those of *options*."""
    return records.read_json(os.path.join(exp, records.SEARCHED), records.SEARCH, records.AGAIN) or _search_of(options)


def _search_of(options: Recipe) -> dict[str, Any]:
    texts = {name: getattr(options, name) for name in ("lenpen", "max_len_a")}  # as given, such as "0.6"
    numbers = {name: float(text) if "." in text else int(text) for name, text in texts.items()}
    return {**{name: getattr(options, name) for name in ("beam", "gnmt_lenpen", "max_len_b")}, **numbers}


def collect(exp: str, subsets: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the run: values for a table of results, followed by the details.

    Args:
        settings: settings of the recipe to include in the record
    """
    scores = {subset: read_scores(exp, subset) for subset in subsets}
    test = scores.get("test", {})
    for subset, found in scores.items():
        if not found["sacrebleu"]:
            raise UsageError(f"{exp}/score-{subset}.json is missing: run again with --stage 7")
    env, data, trained = read_environment(exp), read_data(exp), training_facts(exp)
    tests = [found for name, found in scores.items() if name != "valid"]
    means = {"mean_bleu": "sacrebleu", "mean_tokenised_bleu": "tokenised"} if len(tests) > 1 else {}
    record = {
        **(measures(test) if subsets else {}),
        **{
            name: round(statistics.fmean(found[key].get("bleu", 0.0) for found in tests), 2)
            for name, key in means.items()
        },
        **trained,
        "hardware": env.get("hardware"),
        "commit": trained.get("commit") or env.get("commit"),
        "pairs": {split: facts["pairs"] for split, facts in data.get("sets", {}).items()},
        "date": time.strftime("%Y-%m-%d"),
    }
    record.update({**settings, **trained_with(exp)})
    return {**record, "environment": env, "data": data, "scores": scores}


def measures(test: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of a test set; many language pairs have only BLEU."""
    found = {
        "bleu": test["sacrebleu"]["bleu"],
        "chrf": test["sacrebleu"].get("chrf"),
        "tokenised_bleu": test["tokenised"].get("bleu"),
        "compound_split_bleu": test["compound_split"].get("bleu"),
    }
    known = {name: round(value, 2) for name, value in found.items() if value is not None}
    return {"signature": test["sacrebleu"]["signature"], **known}


def write_json(path: str, content: Any) -> None:
    """Write an object to a file atomically."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
