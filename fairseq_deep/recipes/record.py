"""Records of a run's environment (``env.txt``) and results (``RESULT.json``)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import records
from fairseq_deep.runtime.text import joined
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


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Return the commit of the repository, marked if there are local changes."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        if head.returncode:
            return "unknown"
        return head.stdout.strip() + (" + local changes" if git("status", "--porcelain", "-uno").stdout.strip() else "")
    except OSError:
        return "unknown"


def hardware(gpus: int) -> str:
    if not gpus:
        return f"{os.cpu_count()} cores, {describe_cpu()[0]}"
    import torch

    seen = torch.cuda.device_count()
    if seen < gpus:
        raise UsageError(
            f"torch {torch.__version__} sees {seen} of {gpus} GPUs: install torch for your CUDA, or use --ngpu {seen}"
        )
    return f"{gpus} x {torch.cuda.get_device_name(0)}"


def check_packages(names: list[str]) -> None:
    """Reject a run without a package that a later stage requires."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"this recipe requires {name}: run {sys.executable} -m pip install {name}, then the same command again"
            )


def write_environment(path: str, gpus: int) -> None:
    """Record versions, commit and hardware."""
    facts = {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}
    facts.update(commit=commit(), system=platform.platform(), hardware=hardware(gpus))
    write_text(path, "".join(f"{key:13} {value}\n" for key, value in facts.items()))


def read_environment(exp: str) -> dict[str, str]:
    try:
        with open(os.path.join(exp, "env.txt"), encoding="utf-8") as stream:
            return dict(line.rstrip("\n").split(None, 1) for line in stream)
    except OSError:
        return {}


def read_json(path: str, schema: Any = None) -> dict[str, Any]:
    """Return the content of *path*; empty if the file does not exist."""
    return records.read_json(path, schema or {}, "delete it, then run the same command again")


def read_records(exp: str) -> list[dict[str, Any]]:
    """Return the lines of ``train.jsonl``, except lines that a full disk or a power cut has truncated."""
    return list(records.read_json_lines(os.path.join(exp, "train.jsonl"), records.TRAINED))


def training_facts(exp: str) -> dict[str, Any]:
    """Return updates, epochs, validation perplexities, hours and commits of all sessions, and parameters."""
    facts, sessions, commits, perplexities = {}, {}, [], {}
    if os.path.exists(os.path.join(exp, "train.jsonl")):
        for record in read_records(exp):
            sessions[record["session"]] = record["time"] - record["session"]
            commits += [record["commit"]] if "commit" in record else []
            if record["kind"] == "valid":
                updates, ppl = int(record["valid_num_updates"]), float(record["valid_ppl"])
                perplexities[updates] = ppl  # if a resumed run repeated updates, the later value counts
                facts.update(epochs=record["epoch"], updates=updates, valid_ppl=ppl)
        if perplexities:
            facts["best_valid_ppl"] = min(perplexities.values())
        facts["train_hours"] = round(sum(sessions.values()) / 3600, 4)
        facts["commit"] = ", ".join(dict.fromkeys(commits))
    log, counts = os.path.join(exp, "logs", "4-train.log"), []
    if os.path.exists(log):
        with open(log, encoding="utf-8", errors="replace") as stream:
            counts = PARAMETERS.findall(stream.read())
    facts["parameters"] = int(counts[-1].replace(",", "")) if counts else None
    return facts


def trained_with(exp: str) -> dict[str, Any]:
    """Return the settings that the model was trained with, independent of the current command."""
    flags = effective(read_command(os.path.join(exp, "train.sh")))
    try:
        with open(os.path.join(exp, "trained-with.txt"), encoding="utf-8") as stream:
            _, batch, _, devices = stream.read().splitlines()
        count, max_tokens, update_freq = map(int, batch.split())
    except (OSError, ValueError):
        raise UsageError(
            f"{exp}/trained-with.txt lacks the settings of training: run again with --stage 4"
        ) from None
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
    # If an interrupted run repeated some updates, the later values replace the earlier ones.
    inner = {int(record["num_updates"]): record for record in lines if record["kind"] == "train_inner"}
    valid = {int(record["valid_num_updates"]): record for record in lines if "valid_loss" in record}
    curve = {update: float(valid[update]["valid_loss"]) for update in sorted(valid)}
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
    with open(os.path.join(exp, "logs", "6-generate.log"), encoding="utf-8", errors="replace") as stream:
        found = SPEED.findall(stream.read())
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
    for folder in ("raw", "bpe"):
        data = read_json(os.path.join(exp, "text", folder, "data.json"), records.DATA)
        if data:
            return data
    return {}


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
        **{name: round(statistics.fmean(found[key].get("bleu", 0.0) for found in tests), 2)
           for name, key in means.items()},
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


def text_lines(path: str) -> list[str]:
    with open(path, encoding="utf-8") as stream:
        return stream.read().split("\n")


def samples(exp: str, source_lang: str, target_lang: str, count: int = 3) -> list[tuple[str, ...]]:
    """Choose a few short translations, evenly distributed over the test set: (source, ours, reference)."""
    source = os.path.join(exp, "text", "raw", f"test.{source_lang}")
    if not os.path.exists(source):
        source = os.path.join(exp, "text", "bpe", f"test.{source_lang}")
    files = [source, *(os.path.join(exp, f"test.{kind}.{target_lang}") for kind in ("hyp", "ref"))]
    short = [row for row in zip(*map(text_lines, files)) if row[0] and max(map(len, row)) <= 110]
    chosen = [short[len(short) * k // count] for k in range(min(count, len(short)))]
    return [tuple(joined(text, "subword-nmt") for text in row) for row in chosen]


def difference(against: dict[str, Any]) -> str:
    """Describe the difference to the other system and its significance."""
    parts = [f"{name} {found['difference']:+.2f} (p {found['p']:.3f})" for name, found in against["measures"].items()]
    return f"{against['system']}: {', '.join(parts)}"


def table_rows(exp: str, record: dict[str, Any], target_lang: str) -> list[tuple[str, str]]:
    scores = record["scores"].get("test")
    updates, epochs, minutes = record.get("updates", 0), record.get("epochs", 0), 60 * record.get("train_hours", 0)
    rows = [
        ("parameters", f"{record['parameters']:,}" if record["parameters"] else "unknown"),
        ("training", f"{updates:,} updates to epoch {epochs}, {minutes:.1f} minutes"),
        ("valid ppl", f"{record.get('valid_ppl', '-')} (best {record.get('best_valid_ppl', '-')})"),
        ("hardware", record["hardware"] or "unknown"),
    ]
    if not scores:
        return rows + [("record", os.path.join(exp, "RESULT.json"))]
    rows.append(("sacreBLEU", f"{record['bleu']:.2f}  {record['signature']}"))
    for key, label in (("tokenised", "tokenised"), ("compound_split", "comp. split")):
        if scores[key]:
            rows.append((label, f"{scores[key]['bleu']:.2f}  (not comparable with the line above)"))
    others = {name: found["sacrebleu"]["bleu"] for name, found in record["scores"].items() if name[4:].isdigit()}
    if others:
        names = ", ".join(f"{name} {bleu:.2f}" for name, bleu in others.items())
        rows.append(("other sets", f"{names}; mean of all test sets {record['mean_bleu']:.2f}"))
    if "measures" in scores["sacrebleu"].get("against", {}):  # a multilingual score has pairs instead
        rows.append(("against", difference(scores["sacrebleu"]["against"])))
    files = (("output", f"test.hyp.{target_lang}"), ("model", "averaged.pt"), ("record", "RESULT.json"))
    return rows + [(label, os.path.join(exp, name)) for label, name in files]


def print_table(exp: str, langs: tuple[str, str], record: dict[str, Any]) -> None:
    """Print a few translations and the table of results."""
    print()
    scored = "bleu" in record
    for source, ours, reference in samples(exp, *langs) if scored else []:
        print(f"  {langs[0]:11} {source}\n  {'ours':11} {ours}\n  {'reference':11} {reference}\n")
    for label, value in table_rows(exp, record, langs[1]):
        print(f"  {label:11} {value}")
    print_next(exp)
    if scored:
        print(f"BLEU = {record['bleu']:.2f}")


def print_next(exp: str) -> None:
    """Print commands for the trained model in *exp*."""
    print(f"  {'next':11} fairseq-deep translate {shlex.quote(exp)} --input FILE")
    print(f"  {'':11} fairseq-deep package {shlex.quote(exp)} --output DIR")


def write_json(path: str, content: Any) -> None:
    """Write an object to a file atomically."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
