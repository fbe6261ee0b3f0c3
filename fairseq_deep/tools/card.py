"""The model card of a package or an export: properties, data, scores and usage."""

import argparse
import contextlib
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from fairseq_deep.errors import one_line
from fairseq_deep.runtime import records
from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.runtime.packaged import WEIGHTS

UNKNOWN_LICENCE = "not stated: ask the model's authors"

_MARKUP = re.compile(r"[\\`*_\[\]!#|~$]")
_ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*):(?=\S)")
"""Addresses that a renderer may turn into links."""

_FACTS = (("updates", "updates"), ("epochs", "epochs"), ("train_hours", "hours"),
          ("valid_ppl", "validation perplexity"), ("averaged", "checkpoints averaged"), ("seed", "seed"),
          ("precision", "precision"), ("tokens_per_update", "tokens per update"), ("devices", "devices"),
          ("hardware", "hardware"), ("commit", "commit of the recipe"), ("date", "date"))  # fmt: skip
_SCORES = (("sacrebleu", "sacreBLEU"), ("tokenised", "tokenised BLEU"), ("compound_split", "compound-split BLEU"))


def versions(names: Sequence[str] = ("fairseq_deep", "fairseq", "torch", "safetensors")) -> dict[str, str]:
    """Return the versions of the software that writes the package."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "Python": platform.python_version()}


def make_export_card(
    args: argparse.Namespace, loaded: Any, text: dict[str, Any], search: dict[str, Any], names: Sequence[str],
    rows: dict[str, str], use: str,
) -> str:
    """Return the text of ``README.md`` of an export.

    Args:
        args: "name", "licence", "output" and "checkpoint" of the command
        text, search: as in ``config.json``
        names: Python packages to list with their versions
        rows, use: see :func:`make_card`
    """
    stored = loaded.stored
    config = {
        "name": args.name if args.name is not None else os.path.basename(os.path.abspath(args.output)),
        "arch": stored.stock_arch or stored.flags.arch,
        "library": "fairseq" if stored.stock_arch else "fairseq_deep",
        "licence": args.licence or UNKNOWN_LICENCE,
        "task": {"source_lang": loaded.source_lang, "target_lang": loaded.target_lang},
        "text": text,
        "search": search,
        "made_with": versions(names),
    }  # fmt: skip
    return make_card(config, rows, record_of(args.checkpoint), use=use)


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
    config: dict[str, Any], model: dict[str, str], record: dict[str, Any], use: str | None = None
) -> str:
    """Return the text of ``README.md``.

    Args:
        config: the content of ``config.json``; "library" is the owner of the architecture (default: fairseq_deep)
        model: measured rows of the first table: parameters, weights, dictionaries
        record: the content of the recipe's ``RESULT.json``; empty without a recipe
        use: the section on usage for another format, whose directory has no checksums
    """
    task, text = config["task"], config["text"]
    steps = ["lowercased (the source)"] * text["lowercase"] + ["segmented by jieba"] * _is_segmented(config)
    steps += ["tokenised by sacremoses"] * (text["tokenizer"] == "moses")
    steps += [f"sub-words of {text['sub_words']}"] * bool(text["sub_words"])
    found = config["search"]
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
    parts = [f"# {_cell(config['name'] or 'A translation model')}", _table(("", ""), rows)]
    parts += [_use(config) if use is None else use, *_record(record, task), *([_files()] if use is None else [])]
    return "\n\n".join(parts) + "\n"


def _use(config: dict[str, Any]) -> str:
    task, found = config["task"], config["search"]
    source, target = task["source_lang"], task["target_lang"]
    units = {None: "", "subword-nmt": " --remove-bpe", "sentencepiece": " --remove-bpe sentencepiece"}
    units = units[config["text"]["sub_words"]] + " --task deep_translation --gnmt-lenpen" * found["gnmt_lenpen"]
    return f"""## Use

FOLDER is this directory. Install fairseq_deep (`pip install .` in a clone of its repository); translating does not
require fairseq. Nothing in the directory is a program or a pickle.

Raw text:

    fairseq-deep translate FOLDER --input text.{source} --output text.{target}

In Python:

    from fairseq_deep.runtime import Translator
    Translator("FOLDER").translate("...")

With transformers (`pip install 'transformers>=5'`):

    import fairseq_deep.huggingface
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    tokenizer, model = (c.from_pretrained("FOLDER") for c in (AutoTokenizer, AutoModelForSeq2SeqLM))
    found = model.generate(**tokenizer(["..."], padding=True, return_tensors="pt"))
    tokenizer.batch_decode(found, skip_special_tokens=True)

With fairseq (`pip install -r requirements.txt -c constraints.txt` in the clone), data that
`fairseq-preprocess --srcdict FOLDER/dict.{source}.txt --tgtdict FOLDER/dict.{target}.txt` has binarised:

    fairseq-generate DATA --path FOLDER/{WEIGHTS} --user-dir "$(fairseq-deep path)" \\
        --max-len-a {found["max_len_a"]:g} --max-len-b {found["max_len_b"]} \\
        --beam {found["beam"]} --lenpen {found["lenpen"]}{units}"""


def _is_segmented(config: dict[str, Any]) -> bool:
    return short_code(config["task"]["source_lang"]) == "zh" and config["text"]["tokenizer"] == "moses"


def _record(record: dict[str, Any], task: dict[str, Any]) -> list[str]:
    """Return the sections on data, scores and training that the recipe recorded."""
    if not record:
        return ["## Data and scores\n\nThis model was packaged from a checkpoint, which does not record them."]
    parts = []
    languages = (task["source_lang"], task["target_lang"])
    sets = _part(record, "data", "sets")
    rows = [(split, _number(_part(sets, split).get("pairs")),
             *(_part(sets, split, "sha256").get(lang, "-") for lang in languages)) for split in sets]  # fmt: skip
    if rows:
        heads = ("set", "pairs", *(f"sha256 of the {lang} text" for lang in languages))
        route = str(_part(record, "data").get("route", "not recorded"))
        # a card is public, and a path reveals user and machine
        route = _cell(os.path.basename(route.rstrip("/")) if os.path.isabs(route) else route)
        parts.append(f"## Data\n\nRoute: {route}.\n\n{_table(heads, rows)}")
    rows = []
    for subset, scores in _part(record, "scores").items():
        for key, label in _SCORES:
            found = _part(scores, key)
            if found.get("bleu") is not None:
                rows.append((subset, label, _score(found["bleu"]), _code(found.get("signature", "-"))))
            if found.get("chrf") is not None:
                rows.append((subset, "chrF", _score(found["chrf"]), _code(found.get("chrf_signature", "-"))))
    if rows:
        note = "Only sacreBLEU and chrF, on detokenised text, are comparable with other work."
        parts.append(f"## Scores\n\n{_table(('set', 'measure', 'score', 'signature'), rows)}\n\n{note}")
    rows = [(label, _number(record[key])) for key, label in _FACTS if record.get(key) is not None]
    smoke = "\n\nThis is a test of the recipe (`--smoke`), not a fully trained model." if record.get("smoke") else ""
    return [*parts, f"## Training\n\n{_table(('', ''), rows)}{smoke}"]


def _files() -> str:
    return "## Files\n\n`fairseq-deep check FOLDER` or `sha256sum -c SHA256SUMS` verifies the checksums of all files."


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
