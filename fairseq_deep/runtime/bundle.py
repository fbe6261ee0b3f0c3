"""The files for translating raw text: a checkpoint, two dictionaries, sub-words and the steps of text preparation.

The directory of a recipe or of a packaged model contains all of them. For a single checkpoint, they are searched in its
directory or given as options.
"""

import dataclasses
import os
from typing import Any

from fairseq_deep.errors import UsageError

from . import other_formats, packaged
from .dictionary import SPECIAL, Dictionary
from .exported import CTRANSLATE2, program_of, read_record
from .records import AGAIN, CHECKPOINTS, RERUN, RESULT, SEARCH, SEARCHED, STEPS, read_json
from .text import TextSteps, is_pieces

DEFAULT_SEARCH = {"beam": 4, "lenpen": 0.6, "max_len_a": 1.0, "max_len_b": 50}  # if the experiment does not record it
CODES = ("code", "bpecodes", "spm.model", "sentencepiece.bpe.model")  # all but spm.model as in fairseq's hub


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Paths and settings of one model.

    Attributes:
        checkpoint: the file with the weights
        data: a directory with ``dict.SRC.txt`` and ``dict.TGT.txt``
        codes: subword-nmt merges, or a SentencePiece model (.model); None: tokens are words
        tokenizer: tokenizer applied before the sub-words, "moses" (sacremoses) or "none"
        lowercase: whether the source is lowercased
        source_lang, target_lang: languages; None: as in the checkpoint
        beam, lenpen, max_len_a, max_len_b: search settings of the model's experiment; None if not recorded
        gnmt_lenpen: whether the length penalty is GNMT's
        program: the program that reads the directory *checkpoint*, `CTRANSLATE2` or `TRANSFORMERS`; "": this package
        record: the record of an export for another program
    """

    checkpoint: str
    data: str
    codes: str | None = None
    tokenizer: str = "moses"
    lowercase: bool = False
    source_lang: str | None = None
    target_lang: str | None = None
    beam: int | None = None
    lenpen: float | None = None
    max_len_a: float | None = None
    max_len_b: int | None = None
    gnmt_lenpen: bool = False
    program: str = ""
    record: dict[str, Any] = dataclasses.field(default_factory=dict)

    def text_steps(self, source_lang: str, target_lang: str, source: Dictionary) -> TextSteps:
        """Return the conversion between raw text and tokens, for the model's languages and source dictionary."""
        symbols = source.symbols[len(SPECIAL) :]
        return TextSteps(source_lang, target_lang, self.codes, self.tokenizer, self.lowercase, symbols)


def find_bundle(path: str, **given: Any) -> Bundle:
    """Find the parts of the model at *path*; values in *given* that are not None override them.

    Args:
        path: the directory of a recipe (of one seed), of a packaged model, or of an export for CTranslate2 or
            transformers; or a checkpoint

    Raises:
        UsageError: a part is missing, a packaged model or an export is invalid, or *path* is not a model
    """
    other_formats.reject(path)
    given = {name: value for name, value in given.items() if value is not None}
    if program := program_of(path):
        for name, flag in (("data", "--data"), ("codes", "--bpe-codes")):
            if name in given:
                raise UsageError(f"{path} is a model of {program}, which has dictionaries and sub-words: omit {flag}")
        found = _of_export(packaged.folder_of(path))
    elif packaged.is_package(path):
        found = _of_package(packaged.folder_of(path))
    elif os.path.isdir(path):
        found = _of_recipe(path)
    elif os.path.isfile(path):
        found = _beside(path)
    else:
        raise UsageError(f"{path} does not exist: give the directory of a recipe, a packaged model, or a checkpoint")
    parts = {**found, **given}
    if parts.get("tokenizer") is None:
        parts["tokenizer"] = "none" if parts["codes"] and is_pieces(parts["codes"]) else "moses"
    bundle = Bundle(**parts)
    for place, flag in ((bundle.data, "--data"), (bundle.codes, "--bpe-codes")):
        if place is not None and not os.path.exists(place):
            raise UsageError(f"{place} does not exist: see {flag}")
    return bundle


def search_of(bundle: Bundle) -> dict[str, Any]:
    """Return the search settings of the experiment, with defaults for settings that it does not record."""
    found = {name: getattr(bundle, name) for name in DEFAULT_SEARCH}
    return {name: DEFAULT_SEARCH[name] if value is None else value for name, value in found.items()}


def _of_package(folder: str) -> dict[str, Any]:
    place = packaged.Folder(folder)
    config, checkpoint = packaged.read_config(place), place.place(packaged.WEIGHTS)
    languages = {name: config["task"][name] for name in ("source_lang", "target_lang")}
    steps = {name: config["text"][name] for name in ("tokenizer", "lowercase")}
    name = packaged.codes_of(config)
    codes = os.path.join(folder, name) if name else None
    return {"checkpoint": checkpoint, "data": folder, "codes": codes, **languages, **steps, **config["search"]}


def _of_export(folder: str) -> dict[str, Any]:
    record, program = read_record(folder), program_of(folder)
    codes = _codes_in(folder) if program == CTRANSLATE2 else None  # a tokenizer of transformers has its sub-words
    parts = {"checkpoint": folder, "data": folder, "codes": codes, "program": program, "record": record}
    return {**parts, **record["task"], **record["text"], **record["search"]}


def _of_recipe(folder: str) -> dict[str, Any]:
    checkpoints = [os.path.join(folder, name) for name in CHECKPOINTS]
    checkpoint = next(filter(os.path.isfile, checkpoints), None)
    if checkpoint is None:
        seeds = os.path.isdir(os.path.join(folder, "seed1"))
        cure = "give one of its seeds, such as seed1" if seeds else "give the directory of a recipe that has trained"
        raise UsageError(f"{folder} has none of {', '.join(CHECKPOINTS)}: {cure}, or a checkpoint")
    found = {"checkpoint": checkpoint, "data": os.path.join(folder, "data-bin")}
    result = read_json(os.path.join(folder, "RESULT.json"), RESULT, RERUN)
    result = result or read_json(os.path.join(folder, SEARCHED), SEARCH, AGAIN)
    found.update({name: result[name] for name in SEARCH if name in result})
    return {**found, **_prepared(os.path.join(folder, "text", "bpe"))}


def _beside(checkpoint: str) -> dict[str, Any]:
    folder = os.path.dirname(checkpoint) or "."
    return {"checkpoint": checkpoint, "data": folder, **_prepared(folder)}


def _codes_in(folder: str) -> str | None:
    """Return the file with the sub-words in *folder*; None if there is none."""
    return next(filter(os.path.isfile, (os.path.join(folder, name) for name in CODES)), None)


def _prepared(folder: str) -> dict[str, Any]:
    """Return the text preparation: the merges in *folder* and the settings in its ``steps.json``."""
    found = read_json(os.path.join(folder, "steps.json"), STEPS, "correct it")
    return {
        "codes": _codes_in(folder),
        "tokenizer": found.get("tokenizer"),
        "lowercase": found.get("lowercase", False),
    }
