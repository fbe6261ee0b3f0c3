"""Files that are no models; the errors name the way to use them."""

import codecs
import contextlib
import os

from fairseq_deep.errors import UsageError


def reject(path: str) -> None:
    """Raise `UsageError` if *path* is an archive, an export of torch, or text."""
    if path.endswith((".tgz", ".tar.gz")) and os.path.isfile(path):
        raise UsageError(f"{path} is an archive, not a model: unpack it, and give the directory or the checkpoint")
    if is_text(path):
        raise UsageError(f"{path} is text, not a model: give text with --input (translate) or --text (distill)")
    if path.endswith(".pt2") and os.path.isfile(path):  # loading such a file runs its code
        raise UsageError(f"{path} is an export for other programs: give the model that it was exported from")


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
