"""The model card of a package or an export: properties, data, scores and usage; the text is in ``card.md.jinja``."""

import contextlib
import json
import os
import platform
import re
from collections.abc import Sequence
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

    task, folder = config["task"], os.path.dirname(os.path.abspath(__file__))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.ChainableUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(cell=_cell, code=_code, json=json.dumps, basename=_last, number=_number, score=_score)
    source, target = map(short_code, (task["source_lang"], task["target_lang"]))
    names = {"kind": kind, "config": config, "model": model, "record": record, "source": source, "target": target}
    return environment.get_template("card.md.jinja").render(**names, facts=_FACTS, scores=_SCORES, **more)


def _cell(value: Any) -> str:
    """Return *value* as one line of text without HTML, links, images or markup."""
    text = one_line(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ADDRESS.sub(r"\1&#58;", _MARKUP.sub(r"\\\g<0>", text))


def _code(value: Any) -> str:
    """Return *value* as inline code, also for table cells; only backticks and bars need escaping there."""
    text = one_line(value).replace("`", "'").replace("\\|", "|")
    return f"`{text}`".replace("|", "\\|")


def _last(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _score(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else str(value)
