"""The model card of a package or an export: properties, data, scores and usage; the text is in ``card.md.jinja``."""

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from fairseq_deep.errors import one_line
from fairseq_deep.runtime import records
from fairseq_deep.runtime.language_codes import short_code

UNKNOWN_LICENCE = "not stated: ask the model's authors"

_MARKUP = re.compile(r"[\\`*_\[\]!#|~$]")
_ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*):(?=\S)")
"""Addresses that a renderer may turn into links."""

_FACTS = (("updates", "updates"), ("epochs", "epochs"), ("train_hours", "hours"),
          ("valid_ppl", "validation perplexity"), ("averaged", "checkpoints averaged"), ("seed", "seed"),
          ("precision", "precision"), ("tokens_per_update", "tokens per update"), ("devices", "devices"),
          ("hardware", "hardware"), ("commit", "commit of the recipe"), ("date", "date"))  # fmt: skip
_SCORES = (("sacrebleu", "bleu", "sacreBLEU"), ("sacrebleu", "chrf", "chrF"), ("tokenised", "bleu", "tokenised BLEU"),
           ("compound_split", "bleu", "compound-split BLEU"))  # fmt: skip


def versions(names: Sequence[str] = ("fairseq_deep", "fairseq", "torch", "safetensors")) -> dict[str, str]:
    """Return the versions of the software that writes the package."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "Python": platform.python_version()}


def make_export_card(trained: Any, kind: str, names: Sequence[str], rows: dict[str, str], **more: Any) -> str:
    """Return the text of ``README.md`` of an export.

    Args:
        trained: see `Trained`
        kind: "transformers" or "torch"
        names: Python packages to list with their versions
        rows, more: see :func:`make_card`
    """
    args, stored = trained.args, trained.loaded.stored
    config = {
        "name": args.name if args.name is not None else os.path.basename(os.path.abspath(args.output)),
        "arch": stored.stock_arch or stored.flags.arch,
        "library": "fairseq" if stored.stock_arch else "fairseq_deep",
        "licence": args.licence or UNKNOWN_LICENCE,
        "task": dict(zip(("source_lang", "target_lang"), trained.languages)),
        "text": trained.text,
        "search": trained.search,
        "made_with": versions(names),
    }  # fmt: skip
    return make_card(config, rows, record_of(args.checkpoint), kind, licence=args.licence, **more)


def counts(loaded: Any, tensors: dict[str, Any]) -> dict[str, str]:
    """Return the rows of the card with sizes."""
    sizes = {loaded.source_lang: len(loaded.source), loaded.target_lang: len(loaded.target)}
    kinds = sorted({str(tensor.dtype).partition(".")[2] for tensor in tensors.values()})
    return {
        "parameters": f"{sum(parameter.numel() for parameter in loaded.model.parameters()):,}",
        "weights": f"{' and '.join(kinds)}, {sum(t.numel() * t.element_size() for t in tensors.values()):,} bytes",
        "dictionaries": ", ".join(f"{lang} {size:,}" for lang, size in sizes.items()),
    }


def record_of(run: str) -> dict[str, Any]:
    """Return the record of a recipe's run; empty for a single checkpoint."""
    return records.read_json(os.path.join(run, "RESULT.json"), records.RESULT, records.RERUN)


def make_card(
    config: dict[str, Any], model: dict[str, str], record: dict[str, Any], kind: str = "package", **more: Any
) -> str:
    """Return the text of ``README.md``.

    Args:
        config: the content of ``config.json``; "library" is the owner of the architecture (default: fairseq_deep)
        model: measured rows of the first table: parameters, weights, dictionaries
        record: the content of the recipe's ``RESULT.json``; empty without a recipe
        kind: "package", "transformers" or "torch", which decides the section on usage
        more: other values of the template
    """
    import jinja2

    task, text, found = config["task"], config["text"], config["search"]
    source, target = map(short_code, (task["source_lang"], task["target_lang"]))
    steps = ["lowercased (the source)"] * text["lowercase"]
    steps += ["segmented by jieba"] * (source == "zh" and text["tokenizer"] == "moses")
    steps += ["tokenised by sacremoses"] * (text["tokenizer"] == "moses")
    steps += [f"sub-words of {text['sub_words']}"] * bool(text["sub_words"])
    search = f"beam {found['beam']}, {'GNMT ' * found['gnmt_lenpen']}lenpen {found['lenpen']}, "
    search += f"at most {found['max_len_a']:g} x source + {found['max_len_b']} units"
    rows = [
        ("translates", f"{task['source_lang']} to {task['target_lang']}"),
        ("architecture", _Code(f"{_code(config['arch'])} of {config.get('library', 'fairseq_deep')}")),
        *model.items(),
        ("text", ", ".join(steps) or "unprocessed words"),
        ("search", search),
        ("made with", ", ".join(f"{name} {version}" for name, version in config["made_with"].items())),
        ("licence", config["licence"]),
    ]
    folder = jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__)))
    environment = jinja2.Environment(loader=folder, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(cell=_cell, code=_code, json=json.dumps)
    template = environment.get_template("card.md.jinja")
    names = {"table": _table, "kind": kind, "config": config, "rows": rows, "source": source, "target": target}
    return template.render(**names, record=record, **_recorded(record, task), **more)


def _recorded(record: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """Return the rows on data, scores and training that the recipe recorded."""
    sets, route = _part(record, "data", "sets"), str(_part(record, "data").get("route", "not recorded"))
    # a card is public, and a path reveals user and machine
    route = _cell(os.path.basename(route.rstrip("/")) if os.path.isabs(route) else route)
    sums = [(split, _part(sets, split, "sha256")) for split in sets]
    pairs = [
        (
            split,
            _number(_part(sets, split).get("pairs")),
            *(known.get(task[side], "-") for side in ("source_lang", "target_lang")),
        )
        for split, known in sums
    ]
    scores = []
    for subset, measures in _part(record, "scores").items():
        for key, name, label in _SCORES:
            found = _part(measures, key)
            signature = found.get("signature" if name == "bleu" else "chrf_signature", "-")
            if found.get(name) is not None:
                scores.append((subset, label, _score(found[name]), _code(signature)))
    training = [(label, _number(record[key])) for key, label in _FACTS if record.get(key) is not None]
    return {"route": route, "sets": pairs, "scores": scores, "training": training}


def _part(content: Any, *keys: str) -> dict[str, Any]:
    """Return the object under *keys*; empty if it does not exist."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    """Return *value* as one line of text without HTML, links, images or markup, except code from :func:`_code`."""
    if isinstance(value, _Code):
        return value
    text = one_line(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ADDRESS.sub(r"\1&#58;", _MARKUP.sub(r"\\\g<0>", text))


class _Code(str):
    """Markdown that must not be escaped."""


def _code(value: Any) -> _Code:
    """Return *value* as inline code, also for table cells; only backticks and bars need escaping there."""
    text = one_line(value).replace("`", "'").replace("\\|", "|")
    return _Code(f"`{text}`".replace("|", "\\|"))


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _score(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else str(value)
