"""write a self-contained HTML page about an experiment: scores, curves, settings, data, sample translations

The page does not need a network or other files. It omits the results of unfinished stages.
"""

import argparse
import math
import os
import re
import shlex
import statistics
import sys
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import RERUN, RESULT, SEEDS, read_json
from fairseq_deep.runtime.text import joined
from fairseq_deep.tools import pictures, results, training_logs
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.command_lines import flags_of
from fairseq_deep.tools.generated import Sentences, best, read_generated
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_outputs, write_text

EXAMPLE = "fairseq-deep report exp/demo --output page.html"
TEMPLATE = "report.html.jinja"
COMPARED = {"valid_loss": ("valid loss", ".3f"), "bleu": ("BLEU", ".2f"), "chrf": ("chrF", ".2f"),
            "step_seconds": ("seconds per update", ".3f")}  # fmt: skip
"""Columns on the page of a comparison: {name: (header, format)}."""
LINKS = re.compile(r"(\d{1,6}-\d{1,6})( \d{1,6}-\d{1,6})*")
SUBWORDS = "subword-nmt"
WIDEST = 40  # maximum length of sentences with a drawn alignment, in tokens


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
        if generated:
            raise UsageError(f"{folder} is a comparison, and its page shows no translations: omit --generate-output")
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
        **(choose_samples(first, flags, count, generated) if record or generated else {}),
    }


def choose_samples(folder: str, flags: dict[str, str], count: int, generated: str | None = None) -> dict[str, Any]:
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
