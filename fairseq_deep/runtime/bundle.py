"""What a translation of raw text takes: a checkpoint, two dictionaries, sub-words, and how the text was prepared.

The folder of a recipe and that of a packaged model have them all. Beside a lone checkpoint, they are looked for in its
own folder or given by hand.
"""

import dataclasses
import os
from typing import Any

from fairseq_deep.errors import UsageError

from . import packaged
from .records import RERUN, RESULT, SEARCH, STEPS, read_json

DEFAULT_SEARCH = {"beam": 4, "lenpen": 0.6, "max_len_a": 1.0, "max_len_b": 50}  # where the experiment does not say
CHECKPOINTS = ("averaged.pt", "checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt")
CODES = ("code", "bpecodes", "spm.model")  # of subword-nmt, as fairseq's hub has them, too; of SentencePiece


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Where the parts of one model are.

    Attributes:
        checkpoint: the file with the weights
        data: a folder with ``dict.SRC.txt`` and ``dict.TGT.txt``
        codes: the merges of subword-nmt, or a model of SentencePiece (.model); None: words are units
        tokenizer: what was before the sub-words, "moses" (sacremoses) or "none"
        lowercase: whether the source is lowercased
        source_lang, target_lang: None: as the checkpoint says
        beam, lenpen, max_len_a, max_len_b: of its own experiment; None where it does not say
        gnmt_lenpen: whether the length penalty is GNMT's
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


def find_bundle(path: str, **given: Any) -> Bundle:
    """The parts of the model at *path*; those in *given* that are not None take the place of what is found.

    Args:
        path: the folder of a recipe (of one seed), a packaged model, or a checkpoint

    Raises:
        UsageError: a part is missing, or a packaged model is refused
    """
    given = {name: value for name, value in given.items() if value is not None}
    if packaged.is_package(path):
        found = _of_package(packaged.folder_of(path))
    elif os.path.isdir(path):
        found = _of_recipe(path)
    elif path.endswith(".pt2") and os.path.isfile(path):  # loading one would run its code
        raise UsageError(f"{path} is for other programs: give the model that it was exported from")
    elif os.path.isfile(path):
        found = _beside(path)
    else:
        raise UsageError(f"there is no {path}: give the folder of a recipe, a packaged model, or a checkpoint")
    bundle = Bundle(**{**found, **given})
    for place, flag in ((bundle.data, "--data"), (bundle.codes, "--bpe-codes")):
        if place is not None and not os.path.exists(place):
            raise UsageError(f"there is no {place}: see {flag}")
    return bundle


def search_of(bundle: Bundle) -> dict[str, Any]:
    """Return the beam search of the experiment, with defaults for what it does not record."""
    found = {name: getattr(bundle, name) for name in DEFAULT_SEARCH}
    return {name: DEFAULT_SEARCH[name] if value is None else value for name, value in found.items()}


def _of_package(folder: str) -> dict[str, Any]:
    config = packaged.read_config(folder)
    checkpoint = packaged.place(folder, packaged.WEIGHTS)
    languages = {name: config["task"][name] for name in ("source_lang", "target_lang")}
    steps = {name: config["text"][name] for name in ("tokenizer", "lowercase")}
    name = packaged.codes_of(config)
    codes = os.path.join(folder, name) if name else None
    return {"checkpoint": checkpoint, "data": folder, "codes": codes, **languages, **steps, **config["search"]}


def _of_recipe(folder: str) -> dict[str, Any]:
    checkpoints = [os.path.join(folder, name) for name in CHECKPOINTS]
    checkpoint = next(filter(os.path.isfile, checkpoints), None)
    if checkpoint is None:
        seeds = os.path.isdir(os.path.join(folder, "seed1"))
        cure = "give one of its seeds, as seed1" if seeds else "give the folder of a recipe that has trained"
        raise UsageError(f"{folder} has none of {', '.join(CHECKPOINTS)}: {cure}, or a checkpoint")
    found = {"checkpoint": checkpoint, "data": os.path.join(folder, "data-bin")}
    result = read_json(os.path.join(folder, "RESULT.json"), RESULT, RERUN)
    found.update({name: result[name] for name in SEARCH if name in result})
    return {**found, **_prepared(os.path.join(folder, "text", "bpe"))}


def _beside(checkpoint: str) -> dict[str, Any]:
    folder = os.path.dirname(checkpoint) or "."
    return {"checkpoint": checkpoint, "data": folder, **_prepared(folder)}


def _prepared(folder: str) -> dict[str, Any]:
    """How the text was prepared: the merges in *folder*, and what its ``steps.json`` says."""
    codes = [os.path.join(folder, name) for name in CODES]
    found = read_json(os.path.join(folder, "steps.json"), STEPS, "correct it")
    return {
        "codes": next(filter(os.path.isfile, codes), None),
        "tokenizer": found.get("tokenizer", "moses"),
        "lowercase": found.get("lowercase", False),
    }
