"""Training with several seeds: one common text in the experiment's directory, and one run per seed in seedN.

``RESULT.json`` and a short table contain the results of all seeds.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import RESULT
from fairseq_deep.tools.results import spread
from fairseq_deep.tools.tables import format_table

from .options import flag_of
from .record import print_next, read_json, write_json
from .stages import read_marker

if TYPE_CHECKING:
    from .plan import Plan
    from .recipe import Recipe

# name in RESULT.json, column header, format
FIGURES = (
    ("bleu", "BLEU", "{:.2f}"),
    ("chrf", "chrF", "{:.2f}"),
    ("valid_ppl", "valid ppl", "{:.2f}"),
    ("best_valid_ppl", "best", "{:.2f}"),
    ("difference", "difference", "{:+.2f}"),
    ("p", "p", "{:.3f}"),
)
ROWS = (("mean", "mean"), ("std", "std"), ("least", "min"), ("most", "max"))


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one seed for the table; ``difference`` and ``p`` refer to BLEU."""
    score = record["scores"].get("test", {}).get("sacrebleu", {})
    other = score.get("against", {}).get("measures", {}).get("BLEU", {})
    known = {"bleu": score.get("bleu"), "chrf": score.get("chrf")}
    known.update((name, record.get(name)) for name in ("valid_ppl", "best_valid_ppl"))
    known.update((name, other.get(name)) for name in ("difference", "p"))
    return {name: value for name, value in known.items() if value is not None}


def collect(exp: str, seeds: list[int], failed: list[int]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the record of all seeds, and the results of each."""
    records = {seed: read_json(os.path.join(exp, f"seed{seed}", "RESULT.json"), RESULT) for seed in seeds}
    for seed, record in records.items():
        if not record:
            raise UsageError(f"{exp}/seed{seed}/RESULT.json is missing: run again with --stage 7")
    found = {seed: figures(record) for seed, record in records.items()}
    summary = {}
    for name, _, _ in FIGURES:
        values = spread([row.get(name) for row in found.values()])
        if values and name != "p":
            summary[name] = values
    signatures = dict.fromkeys(record["signature"] for record in records.values() if "signature" in record)
    facts = {"signature": "; ".join(signatures), "seeds": seeds, "failed": failed, "runs": records}
    return {**summary, **facts}, found


def table(summary: dict[str, Any], found: dict[int, dict[str, Any]], failed: list[int]) -> str:
    """Format a table with a row per seed and per entry of ``ROWS``."""
    columns = [column for column in FIGURES if any(column[0] in row for row in found.values())]
    lines = [["seed", *(head for _, head, _ in columns)]]
    for seed in sorted([*found, *failed]):
        row = found.get(seed, {})
        cells = [form.format(row[name]) if name in row else "-" for name, _, form in columns]
        lines.append([str(seed), *cells] if seed in found else [str(seed), "FAILED", *cells[1:]])
    for label, key in ROWS:
        values = [summary.get(name, {}).get(key) for name, _, _ in columns]
        forms = [form if key != "std" else "{:.2f}" for _, _, form in columns]
        lines.append([label, *("" if value is None else form.format(value) for form, value in zip(forms, values))])
    return format_table(lines, right=range(1, len(columns) + 1), indent="  ")


def parse(text: str) -> list[int]:
    """Parse a number of seeds (3: seeds 1, 2 and 3), or a list with at least one comma ("4,7" or "7,").

    Raises:
        UsageError: *text* is neither, or repeats a seed
    """
    if re.fullmatch("[1-9][0-9]{0,2}", text):
        return list(range(1, int(text) + 1))
    if not re.fullmatch("((0|[1-9][0-9]*),)+(0|[1-9][0-9]*)?", text):
        raise UsageError(f"--seeds must be a number, such as 3, or a list such as 4,7 (one seed: 7,), not '{text}'")
    seeds = [int(word) for word in text.removesuffix(",").split(",")]
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise UsageError(f"--seeds {text} has seed {seed} twice: remove one")
    return seeds


def resolve(plan: Plan) -> list[int]:
    """Return the seeds of a plan; empty for a single run."""
    options = plan.options
    if not options.seeds:
        for name in ("jobs", "launcher"):
            if name in options.given and options.task != "compare":
                raise UsageError(f"{flag_of(name)} requires several training runs: add --seeds, or omit it")
        if options.stop_stage >= 4 and holds_seeds(plan.exp):
            raise UsageError(f"{plan.exp} has several seeds: give --seeds, or another --exp")
        return []
    if "seed" in options.given:
        raise UsageError("--seed and --seeds exclude each other: give one")
    check_launcher(options)
    found = parse(options.seeds)
    if os.path.exists(plan.path("checkpoints")):
        raise UsageError(f"{plan.exp} has a run of one seed: use another --exp")
    return found


def check_launcher(options: Recipe) -> None:
    """Reject options of the queue of training runs that have no effect or are missing."""
    for name in ("slurm", "slurm_hours"):
        if name in options.given and options.launcher != "slurm":
            flag = flag_of(name)
            raise UsageError(f"{flag} has no effect without --launcher slurm: add that, or omit {flag}")
    if options.launcher == "slurm" and "ngpu" not in options.given:
        raise UsageError("--launcher slurm requires --ngpu, the number of GPUs of each job: give it, or 0 for the CPU")


def holds_seeds(folder: str) -> bool:
    """Return whether *folder* has runs of several seeds."""
    return any(
        glob.glob(os.path.join(glob.escape(folder), "seed[0-9]*", name)) for name in ("checkpoints", "test.hyp.*")
    )


def link_text(shared: str, folder: str) -> None:
    """Link the text of the directory *shared* into the directory of a run, with the markers of its stages.

    A text of the run itself is replaced if it differs.
    """
    os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
    same = read_marker(os.path.join(folder, ".done.3")) == read_marker(os.path.join(shared, ".done.3"))
    unlink_text(folder)
    for part in ("text", "data-bin"):
        path = os.path.join(folder, part)
        if not same:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(os.path.relpath(os.path.realpath(os.path.join(shared, part)), os.path.realpath(folder)), path)
    for name in ("env.txt", *(f".done.{stage}" for stage in range(4))):
        if os.path.isfile(os.path.join(shared, name)):
            shutil.copyfile(os.path.join(shared, name), os.path.join(folder, name))


def unlink_text(folder: str) -> bool:
    """Remove links to the text of another run; return whether there were any."""
    links = [path for path in (os.path.join(folder, part) for part in ("text", "data-bin")) if os.path.islink(path)]
    for path in links:
        os.remove(path)
    return bool(links)


def summarise(exp: str, seeds: list[int], failed: list[int]) -> None:
    """Write the record of all seeds and print their table."""
    if not seeds:
        return
    summary, found = collect(exp, seeds, failed)
    path = os.path.join(exp, "RESULT.json")
    write_json(path, summary)
    scored = "bleu" in summary
    print()
    print(table(summary, found, failed))
    print(f"  signature {summary['signature']}" if scored else "  not translated")
    print(f"  record    {path}")
    print_next(os.path.join(exp, f"seed{seeds[0]}"))
    if scored:
        print(f"BLEU = {summary['bleu']['mean']:.2f}")
