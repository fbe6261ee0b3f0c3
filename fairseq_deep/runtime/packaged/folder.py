"""The folder of a packaged model: its files, their sums, and how a file of it is opened."""

import os
import re
import stat
from collections.abc import Iterable

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import sha256

WEIGHTS, CONFIG, CARD, SUMS = "model.safetensors", "config.json", "README.md", "SHA256SUMS"
CODES = {"subword-nmt": "code", "sentencepiece": "spm.model"}
"""The file of each kind of sub-words."""
LARGEST_TEXT = 1 << 20
"""Bytes of the configuration and of the sums: they take some thousand."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([\w.-]+)")


class PackageError(UsageError):
    """A packaged model that is refused."""


def is_package(path: str) -> bool:
    """Whether *path* is the folder of a packaged model, or the weights in one."""
    folder = folder_of(path)
    return all(os.path.lexists(os.path.join(folder, name)) for name in (WEIGHTS, CONFIG))


def folder_of(path: str) -> str:
    """The folder that *path* is, or is the weights of."""
    return os.path.dirname(path) or "." if os.path.basename(path) == WEIGHTS else path


def dictionary_name(lang: str) -> str:
    """The file with the dictionary of a language, as fairseq's translation task calls it."""
    return f"dict.{lang}.txt"


def place(folder: str, name: str) -> str:
    """The path of the file *name*.

    Raises:
        PackageError: it is missing, or no regular file: a link may lead anywhere
    """
    path = os.path.join(folder, name)
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise PackageError(f"{path}: {error.strerror or error}; the folder is not whole") from error
    if stat.S_ISLNK(mode):
        raise PackageError(f"{path}: refused, because it is a link; copy the folder with cp -rL if you made it")
    if not stat.S_ISREG(mode):
        raise PackageError(f"{path}: refused, because it is no regular file")
    return path


def read_text(folder: str, name: str) -> str:
    """The text of a small file.

    Raises:
        PackageError: it cannot be read, is too large, or is not UTF-8
    """
    path = place(folder, name)
    try:
        with open(path, "rb") as stream:
            content = stream.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise PackageError(f"{path}: refused, because it has more than {LARGEST_TEXT:,} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(f"{path}: cannot be read ({error})") from error


def verify_checksums(folder: str, names: Iterable[str]) -> None:
    """Compare the files *names* with their sums.

    Raises:
        PackageError: one is missing, has no sum, or has another
    """
    path, sums = os.path.join(folder, SUMS), read_sums(folder)
    for name in names:
        if name not in sums:
            raise PackageError(f"{path}: has no sum of {name}; the folder is not whole")
        if hash_file(place(folder, name)) != sums[name]:
            damaged = os.path.join(folder, name)
            raise PackageError(f"{damaged}: damaged, its sha256 is not that of {SUMS}; copy it again")


def read_sums(folder: str) -> dict[str, str]:
    """The sums by the names of the files, as the program sha256sum writes them."""
    sums: dict[str, str] = {}
    for line in read_text(folder, SUMS).splitlines():
        found = _LINE.fullmatch(line)
        if found is None or found[2] in sums:
            raise PackageError(f"{os.path.join(folder, SUMS)}: not what sha256sum writes, in the line {line[:40]!r}")
        sums[found[2]] = found[1]
    return sums


def find_problems(folder: str) -> list[str]:
    """What of the files in *folder* is not as its sums say; the weights and settings are :func:`load`'s to judge."""
    try:
        sums = read_sums(folder)
    except PackageError as error:
        return [str(error)]
    problems = [f"{name!r} is not in {SUMS}" for name in sorted(os.listdir(folder)) if name not in (SUMS, *sums)]
    for name in sums:
        try:
            verify_checksums(folder, [name])
        except PackageError as error:
            problems.append(str(error))
    return problems


def refuse_others(folder: str, names: Iterable[str]) -> None:
    """Refuse a folder that holds more than *names*: fairseq's hub takes sub-words from files of many names.

    Raises:
        PackageError: with the name that does not belong to a package, or is no regular file
    """
    allowed = {CARD, CONFIG, SUMS, WEIGHTS, *names}
    for name in sorted(os.listdir(folder)):
        if name not in allowed:
            path = os.path.join(folder, name)
            raise PackageError(f"{path}: refused, because no package has a file of this name; move it elsewhere")
        place(folder, name)


def write_sums(folder: str) -> None:
    """Write the sums of all files in *folder*."""
    names = sorted(os.listdir(folder))
    lines = [f"{hash_file(os.path.join(folder, name))}  {name}\n" for name in names]
    with open(os.path.join(folder, SUMS), "w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(lines)


def hash_file(path: str) -> str:
    """The sum of a file.

    Raises:
        PackageError: it cannot be read
    """
    try:
        return sha256(path)
    except OSError as error:
        raise PackageError(f"{path}: cannot be read ({error.strerror or error})") from error
