"""Directories of CTranslate2 and transformers: recognising them, and the record that ``export`` writes into them.

Their own files lack what translating raw text requires: languages, text steps, search settings and length limits. The
record ``fairseq_deep.json`` has them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from fairseq_deep.errors import UsageError

from .packaged.folder import CONFIG, SUMS, WEIGHTS, folder_of
from .records import SEARCH, STEPS, amount, exactly, line, optional, read_json, truth, whole

RECORD = "fairseq_deep.json"
CTRANSLATE2, TRANSFORMERS = "CTranslate2", "transformers"
FILES = {CTRANSLATE2: (CONFIG, "model.bin"), TRANSFORMERS: (CONFIG, WEIGHTS, "tokenizer_config.json")}
"""Files of a directory by the program that reads it."""
_IMPORT = ", or convert it with fairseq-deep import --from huggingface"
SCHEMA = exactly({
    "task": exactly({"source_lang": line, "target_lang": line}),
    "text": exactly(STEPS),
    "search": exactly(SEARCH),
    "facts": exactly({
        "arch": optional(line), "parameters": amount, "layers": [whole(1, 1 << 20)],
        "max_source": amount, "max_target": amount, "pads_left": truth,
    }),
})  # fmt: skip


def program_of(path: str) -> str:
    """Return the program that reads the directory *path*, `CTRANSLATE2` or `TRANSFORMERS`; otherwise ""."""
    folder = folder_of(path)
    if os.path.lexists(os.path.join(folder, SUMS)):  # only packages have checksums
        return ""
    found = (name for name, files in FILES.items() if all(os.path.lexists(os.path.join(folder, f)) for f in files))
    return next(found, "")


def reject_export(path: str) -> None:
    """Raise `UsageError` if *path* is a directory for another program."""
    if program := program_of(path):
        cure = "give the model that it was exported from" + _IMPORT * (program == TRANSFORMERS)
        raise UsageError(f"{path} is a model of {program}, only for translate and serve: {cure}")


def write_record(folder: str, bundle: Any, search: dict[str, Any], facts: Any, languages: Sequence[str]) -> None:
    """Write the record of an export.

    Args:
        bundle, facts: the model's :class:`Bundle` and :class:`ModelFacts`
        search: its search settings
        languages: source and target language
    """
    record = {
        "task": dict(zip(("source_lang", "target_lang"), languages)),
        "text": {name: getattr(bundle, name) for name in STEPS},
        "search": {**search, "gnmt_lenpen": False},  # no other program has GNMT's
        "facts": dataclasses.asdict(facts),
    }
    with open(os.path.join(folder, RECORD), "w", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(record, indent=1) + "\n")


def read_record(folder: str) -> dict[str, Any]:
    """Return the record of an export.

    Raises:
        UsageError: the directory has no record, or an invalid one
    """
    cure = "export the model again with this version"
    record = read_json(os.path.join(folder, RECORD), SCHEMA, cure)
    if not record:
        program = program_of(folder)
        cure += _IMPORT * (program == TRANSFORMERS)
        raise UsageError(f"{folder} is a model of {program} without {RECORD}: {cure}")
    return record
