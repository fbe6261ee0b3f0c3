"""The model card of an export for transformers: the card of a package with other instructions."""

import argparse
import json
from typing import Any

from fairseq_deep.runtime.language_codes import short_code
from fairseq_deep.tools.card import counts, make_export_card
from fairseq_deep.tools.huggingface_pieces import tags_of

NAMES = ("fairseq_deep", "torch", "transformers", "tokenizers")


def make(parts: Any, args: argparse.Namespace, search: dict[str, Any], name: str, size: int, found: str) -> str:
    """Return the text of ``README.md``.

    Args:
        parts: see `huggingface_export.Parts`
        search: settings of the beam search
        name, size: name of the class, and number of parameters that it stores
        found: result of the check
    """
    loaded, bundle = parts.loaded, parts.bundle
    text = {"tokenizer": bundle.tokenizer, "lowercase": bundle.lowercase, "sub_words": parts.steps.kind}
    own = sum(parameter.numel() for parameter in loaded.model.parameters())
    stored = f" ({size:,} as stored by the class)" * (size != own)
    rows = {"class": name, "parameters": f"{own:,}{stored}", "weights": "float32", "checked": found}
    rows["dictionaries"] = counts(loaded, {})["dictionaries"]
    use = _use(parts, search, text)
    body = make_export_card(args, loaded, text, {**search, "gnmt_lenpen": False}, NAMES, rows, use)
    return _front([loaded.source_lang, loaded.target_lang], args.licence) + body


def _front(languages: list[str], licence: str | None) -> str:
    """Return the front matter for model hubs; JSON values are valid YAML."""
    lines = [f"language: {json.dumps(languages)}", "library_name: transformers", "pipeline_tag: translation"]
    lines += [f"license: {json.dumps(licence.lower())}"] if licence else []
    return "\n".join(["---", *lines, "---", "", ""])


def _use(parts: Any, search: dict[str, Any], text: dict[str, Any]) -> str:
    """Return instructions to translate raw text with this directory and public packages."""
    needs = "'transformers>=5' torch" + " sacremoses" * (text["tokenizer"] == "moses")
    segmented = text["tokenizer"] == "moses" and short_code(parts.loaded.source_lang) == "zh"
    needs += " jieba" * segmented
    takes = "raw text" if text["tokenizer"] == "none" else "text tokenised as above"
    tags = tags_of(parts.loaded.source.symbols)
    known = ", ".join(f"`{tag}`" for tag in tags)
    notes = [f"Begin each line with the tag of its target language and a blank: {known}."] * bool(tags)
    notes.append("Sources must be padded on the right, as by the tokenizer.")
    if parts.kind not in ("m2m_100", "fsmt"):
        most = min(parts.plain.encoder.max_positions(), parts.plain.decoder.max_positions())
        notes.append(f"The model has {most} positions; longer sentences are an error.")
    return (
        f"## Use\n\nFOLDER is this directory:\n\n    pip install {needs}\n\n```python\n"
        f"{code(parts, search, text, segmented)}```\n\n{' '.join(notes)}\nNothing in the directory is a program or a "
        f"pickle. The tokenizer expects {takes}."
    )


def code(parts: Any, search: dict[str, Any], text: dict[str, Any], segmented: bool) -> str:
    """Return the Python code of the card."""
    loaded, moses = parts.loaded, text["tokenizer"] == "moses"
    tagged = bool(tags_of(loaded.source.symbols)) and (moses or text["lowercase"])
    lines = ["import re", ""] * tagged + ["import jieba"] * segmented
    lines += ["from sacremoses import MosesDetokenizer, MosesTokenizer"] * moses
    lines += ["from transformers import AutoModelForSeq2SeqLM, AutoTokenizer", "", 'folder = "FOLDER"',
              "tokenizer = AutoTokenizer.from_pretrained(folder)",
              "model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()"]  # fmt: skip
    decoder = "tokenizer" if parts.sizes.shared else "target"
    lines += ['target = AutoTokenizer.from_pretrained(folder, subfolder="target")'] * (decoder == "target")
    if moses:
        source, target = (json.dumps(short_code(lang)) for lang in (loaded.source_lang, loaded.target_lang))
        lines += [f"moses, undo = MosesTokenizer({source}), MosesDetokenizer({target})"]
    lines += ["", "", "def tag(line):  # the tokenizer would split it",
              '    return re.match("(<2[^ >]+> ?)?", line).end()'] * tagged  # fmt: skip
    line = "line[tag(line) :]" if tagged else "line"
    words = f"{line}.lower()" if text["lowercase"] else line
    words = f'" ".join(jieba.cut({words}))' if segmented else words
    words = f"moses.tokenize({words}, return_str=True)" if moses else words
    words = f"line[: tag(line)] + {words}" if tagged else words
    limit = f"int({search['max_len_a']:g} * batch.input_ids.size(1) + {search['max_len_b']})"
    limit = f"min({limit}, {parts.plain.decoder.max_positions() - 1}) + 1"
    ended = "undo.detokenize(text.split())" if moses else "text"
    lines += ["", "", "def translate(lines):", f"    words = [{words} for line in lines]",
              '    batch = tokenizer(words, return_tensors="pt", padding=True)',
              f"    found = model.generate(**batch, max_new_tokens={limit})",
              f"    texts = [{decoder}.decode([i for i in row if i > 2]) for row in found.tolist()]",
              f'    return [{ended} if line.strip() else "" for line, text in zip(lines, texts)]']  # fmt: skip
    return "\n".join(lines) + "\n"
