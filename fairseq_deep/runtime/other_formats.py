"""Models in the formats of other programs, which the runtime does not read; the errors name the way to use them."""

import codecs
import contextlib
import os

from fairseq_deep.errors import UsageError

from .packaged.folder import CONFIG, SUMS, WEIGHTS, folder_of

CTRANSLATE2 = (CONFIG, "model.bin")
TRANSFORMERS = (CONFIG, WEIGHTS, "tokenizer_config.json")


def reject(path: str) -> None:
    """Raise `UsageError` if *path* is a model of CTranslate2 or transformers, an export of torch, or text."""
    if path.endswith((".tgz", ".tar.gz")) and os.path.isfile(path):
        raise UsageError(f"{path} is an archive, not a model: unpack it, and give the directory or the checkpoint")
    if is_text(path):
        raise UsageError(f"{path} is text, not a model: give text with --input (translate) or --text (distill)")
    original = "give the model that it was exported from"
    if path.endswith(".pt2") and os.path.isfile(path):  # loading such a file runs its code
        raise UsageError(f"{path} is an export for other programs: {original}")
    program = program_of(path)
    if program == "CTranslate2":
        raise UsageError(
            f"{path} is a CTranslate2 model: load it with the package ctranslate2, or {original} (translate and serve: "
            "with --engine ctranslate2)"
        )
    if program == "transformers":
        raise UsageError(
            f"{path} is a model of transformers: load it with transformers, convert it with fairseq-deep import --from "
            f"huggingface, or {original}"
        )


def program_of(path: str) -> str:
    """Return the program that reads the directory *path*, "CTranslate2" or "transformers"; otherwise ""."""
    folder = folder_of(path)
    if os.path.lexists(os.path.join(folder, SUMS)):  # only packages have checksums
        return ""
    if _has(path, CTRANSLATE2):
        return "CTranslate2"
    return "transformers" if _has(folder, TRANSFORMERS) else ""


def is_text(path: str) -> bool:
    """Return whether *path* is a file of text, plain or compressed by gzip, without the name of a model."""
    if not os.path.isfile(path) or path.endswith((".pt", ".pth", ".bin", ".safetensors")):
        return False
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, "rb") as file:
        start = file.read(4096)
        if start.startswith(b"\x1f\x8b"):
            return True
        decoded = codecs.getincrementaldecoder("utf-8")().decode(start)  # a character may be cut at the end
        return bool(decoded) and "\0" not in decoded
    return False


def _has(folder: str, names: tuple[str, ...]) -> bool:
    return all(os.path.lexists(os.path.join(folder, name)) for name in names)
