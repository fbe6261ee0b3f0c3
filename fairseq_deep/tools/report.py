"""write a self-contained HTML page about an experiment: scores, curves, settings, data, sample translations

The page does not need a network or other files. It omits the results of unfinished stages.
"""

import argparse
import math
import os
import shlex
import statistics
import sys
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import RERUN, RESULT, SEEDS, read_json
from fairseq_deep.tools import pictures, results, samples, training_logs
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.command_lines import flags_of
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_outputs, write_text

EXAMPLE = "fairseq-deep report exp/demo --output page.html"
TEMPLATE = "report.html.jinja"
COMPARED = {"valid_loss": ("valid loss", ".3f"), "bleu": ("BLEU", ".2f"), "chrf": ("chrF", ".2f"),
            "step_seconds": ("seconds per update", ".3f")}  # fmt: skip
"""Columns on the page of a comparison: {name: (header, format)}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the experiment, the outputs, and the choice of translations."""
    parser.add_argument(
        "run_folder", metavar="RUN", help="directory of an experiment: one run, several seeds, or a comparison"
    )
    parser.add_argument("--output", metavar="FILE", help="page to write (default: report.html in RUN)")
    parser.add_argument("--title", help="title of the page (default: the directory's name)")
    parser.add_argument(
        "--samples", type=at_least_one, default=20, metavar="N",
        help="number of translations to show, evenly distributed over the test set (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--generate-output", metavar="FILE",
        help="output of fairseq-generate with the translations and alignments to show",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Collect the results, draw the curves and write the page."""
    folder = args.run_folder
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such directory; give the directory of a recipe's experiment")
    output = args.output or os.path.join(folder, "report.html")
    check_outputs([output], [folder, args.generate_output], own=["report.html"])
    page = gather(folder, args.samples, args.generate_output)
    title = args.title or os.path.basename(os.path.abspath(folder))
    write_text(output, render(title=title, **page, **_drawn(page["runs"])))
    print(f"{folder} -> {output}")
    return 0


def gather(folder: str, count: int, generated: str | None = None) -> dict[str, Any]:
    """Return the template's variables for the experiment in *folder*.

    Args:
        count: maximum number of translations
        generated: output of ``fairseq-generate`` with translations, instead of the experiment's

    Raises:
        UsageError: *folder* is not the directory of an experiment, or one of its files cannot be read
    """
    seeds = _seeds(folder)
    runs = {f"seed {seed}": os.path.join(folder, f"seed{seed}") for seed in seeds} or {"": folder}
    first = next(iter(runs.values()))
    command = _command(os.path.join(first, "train.sh"))
    if not command and (stored := results.by_system(results.read(folder))):
        return _compared(stored)
    if not command:
        raise UsageError(f"{folder} has no train.sh: give the directory of a recipe that has begun to train")
    flags = {flag.lstrip("-"): value for flag, value in flags_of(command).items()}
    record = _result(first, RESULT)
    return {
        "seeds": _result(folder, SEEDS) if seeds else {},
        "record": record,
        "flags": sorted(flags.items()),
        "command": shlex.join(command),
        "runs": {
            name or "this run": training_logs.read_run(path, started=True)
            for name, place in runs.items()
            if (path := training_logs.find_log(place))
        },
        **(samples.choose(first, flags, count, generated) if record or generated else {}),
    }


def _compared(systems: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the template's variables for a comparison: a row per system, losses, and common settings."""
    rows, losses, flags, first = [], {}, [], {}
    for name, runs in systems.items():
        first = first or next(iter(runs.values()))
        row = {key: results.spread(run.get(key) for run in runs.values()) for key in COMPARED}
        sizes = [run.get("parameters") or 0 for run in runs.values()]
        rows.append({"system": name, "seeds": sorted(runs), "parameters": max(sizes), **row})
        found = [run["curve"] for run in runs.values() if run.get("curve")]
        updates = sorted(set.intersection(*map(set, found)), key=int) if found else ()
        means = {int(update): statistics.fmean(curve[update] for curve in found) for update in updates}
        losses[name] = {"valid_loss": means} if means else {}
        flags += [run.get("flags", {}).items() for run in runs.values()]
    columns = {key: style for key, style in COMPARED.items() if any(row[key] for row in rows)}
    record = {name: first[name] for name in ("commit", "environment") if name in first}
    commands = [(name, next(iter(runs.values())).get("command", "")) for name, runs in systems.items()]
    return {"systems": rows, "columns": columns, "record": record, "commands": commands, "runs": losses,
            "flags": sorted(set.intersection(*map(set, flags)))}  # fmt: skip


def _seeds(folder: str) -> list[int]:
    names = (name[4:] for name in os.listdir(folder) if name.startswith("seed"))
    found = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    return [seed for seed in found if os.path.isfile(os.path.join(folder, f"seed{seed}", "train.sh"))]


def _result(folder: str, schema: dict[str, Any]) -> dict[str, Any]:
    return read_json(os.path.join(folder, "RESULT.json"), schema, RERUN)


def _command(path: str) -> list[str]:
    try:
        return shlex.split(read_lines(path)[-1]) if os.path.isfile(path) else []
    except ValueError as error:
        raise UsageError(f"{path} was not written by a recipe: {error}") from error


def _drawn(runs: dict[str, training_logs.Run]) -> dict[str, str]:
    """Return the picture of the runs as SVG, or the reason for its absence; empty before the first log entry."""
    found = {name: run for name, run in runs.items() if run}
    if not found:
        return {}
    try:
        pictures.check_library()
    except UsageError as error:
        print(f"fairseq-deep report: the page has no curves: {error}", file=sys.stderr)
        return {"no_curves": str(error)}
    return {"curves": pictures.as_svg(pictures.draw_runs(found))}


def render(**page: Any) -> str:
    """Render the template; all values are escaped."""
    import jinja2

    folder = jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__)))
    environment = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.ChainableUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, chosen=chosen)
    return environment.get_template(TEMPLATE).render(**page)


def number(value: Any, form: str = ",") -> str:
    """Format a number for readers; a dash for None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "–" if value is None else str(value) or "–"
    return format(value, form) if math.isfinite(value) else str(value)


def chosen(record: dict[str, Any], names: str) -> list[tuple[str, Any]]:
    """Return the entries of *record* with one of the *names*, for readers."""
    return [(name.replace("_", " "), record[name]) for name in names.split() if name in record]
