"""The directory of a packaged model: its files, checksums, and safe access to files."""

import os
import re
import stat
from collections.abc import Iterable

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import checksum

WEIGHTS, CONFIG, CARD, SUMS = "model.safetensors", "config.json", "README.md", "SHA256SUMS"
CODES = {"subword-nmt": "code", "sentencepiece": "spm.model"}
"""The file of each kind of sub-words."""
LARGEST_TEXT = 1 << 20
"""Maximum size of the configuration and of the checksums, in bytes; typical sizes are a few thousand."""
_OTHERS = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|training_args\.bin|trainer_state\.json"
    r"|(all|train|eval|test|predict)_results\.json|generated_predictions\.txt|checkpoint-\d+|runs"
    r"|\.git|\.gitattributes|\.cache"
)
"""Files of transformers' ``Trainer`` and of the Hugging Face Hub, which are accepted and never opened."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([\w.-]+)")


class PackageError(UsageError):
    """A packaged model is invalid or corrupt."""


def is_package(path: str) -> bool:
    """Return whether *path* is the directory of a packaged model, or the weights in it."""
    folder = folder_of(path)
    return all(os.path.lexists(os.path.join(folder, name)) for name in (WEIGHTS, CONFIG))


def folder_of(path: str) -> str:
    """Return the directory of a package; *path* is this directory or the weights in it."""
    return os.path.dirname(path) or "." if os.path.basename(path) == WEIGHTS else path


def dictionary_name(lang: str) -> str:
    """Return the file name of a language's dictionary, as in fairseq's translation task."""
    return f"dict.{lang}.txt"


def place(folder: str, name: str) -> str:
    """Return the path of the file *name*.

    Raises:
        PackageError: the file is missing or not a regular file; a link may point outside of the directory
    """
    path = os.path.join(folder, name)
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise PackageError(f"{path}: {error.strerror or error}; copy the directory again") from error
    if stat.S_ISLNK(mode):
        raise PackageError(f"{path}: must not be a link; copy the directory with cp -rL if you created the link")
    if not stat.S_ISREG(mode):
        raise PackageError(f"{path}: must be a regular file; copy the directory again")
    return path


def read_text(folder: str, name: str) -> str:
    """Read a small text file.

    Raises:
        PackageError: the file cannot be read, is too large, or is not UTF-8
    """
    path = place(folder, name)
    try:
        with open(path, "rb") as stream:
            content = stream.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise PackageError(f"{path}: must have at most {LARGEST_TEXT:,} bytes; copy the directory again")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(f"{path}: cannot be read ({error})") from error


def verify_checksums(folder: str, names: Iterable[str]) -> None:
    """Verify the checksums of the files *names*.

    Raises:
        PackageError: a file is missing, has no checksum, or has another one
    """
    path, sums = os.path.join(folder, SUMS), read_sums(folder)
    for name in names:
        if name not in sums:
            raise PackageError(f"{path}: has no checksum of {name}; copy the directory again")
        if hash_file(place(folder, name)) != sums[name]:
            damaged = os.path.join(folder, name)
            raise PackageError(f"{damaged}: corrupt, its sha256 differs from {SUMS}; copy it again")


def read_sums(folder: str) -> dict[str, str]:
    """Read the checksums, in the format of the program sha256sum, by file name."""
    sums: dict[str, str] = {}
    for line in read_text(folder, SUMS).splitlines():
        found = _LINE.fullmatch(line)
        if found is None or found[2] in sums:
            raise PackageError(f"{os.path.join(folder, SUMS)}: invalid line {line[:40]!r}; copy the directory again")
        sums[found[2]] = found[1]
    return sums


def _own(folder: str) -> list[str]:
    """Return the names of all files in *folder*, without transformers' and the Hub's."""
    return sorted(name for name in os.listdir(folder) if not _OTHERS.fullmatch(name))


def find_problems(folder: str) -> list[str]:
    """Return the differences between the files in *folder* and their checksums; :func:`load` checks the contents."""
    try:
        sums = read_sums(folder)
    except PackageError as error:
        return [str(error)]
    problems = [f"{name!r} is not in {SUMS}" for name in _own(folder) if name not in (SUMS, *sums)]
    for name in sums:
        try:
            verify_checksums(folder, [name])
        except PackageError as error:
            problems.append(str(error))
    return problems


def refuse_others(folder: str, names: Iterable[str]) -> None:
    """Reject a directory with files other than *names*; fairseq's hub reads sub-words from files with various names.

    Raises:
        PackageError: a file does not belong to a package, or is not a regular file
    """
    allowed = {CARD, CONFIG, SUMS, WEIGHTS, *names}
    for name in _own(folder):
        if name not in allowed:
            path = os.path.join(folder, name)
            raise PackageError(f"{path}: rejected: a package must not have a file of this name; move it elsewhere")
        place(folder, name)


def write_sums(folder: str) -> None:
    """Write the checksums of all files in *folder*."""
    names = sorted(os.listdir(folder))
    lines = [f"{hash_file(os.path.join(folder, name))}  {name}\n" for name in names]
    with open(os.path.join(folder, SUMS), "w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(lines)


def hash_file(path: str) -> str:
    """Return the checksum of a file.

    Raises:
        PackageError: the file cannot be read
    """
    try:
        return checksum(path)
    except OSError as error:
        raise PackageError(f"{path}: cannot be read ({error.strerror or error})") from error
