"""The directory of a packaged model: its files, checksums, and safe access to files."""

import functools
import os
import re
import stat
from collections.abc import Iterable

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import checksum, read_text

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


class Folder:
    """Safe access to the files of a package.

    Args:
        path: the directory
        cached: whether it is in the Hub's cache, which consists of links, and may have other files

    Raises:
        UsageError: (all methods) a file is missing, not a regular file, or unreadable. Without *cached*, links are
            rejected too, because they may point outside of the directory
    """

    def __init__(self, path: str, cached: bool = False):
        self.path, self.cached = path, cached

    def place(self, name: str) -> str:
        """Return the path of the file *name*."""
        path = os.path.join(self.path, name)
        try:
            mode = (os.stat if self.cached else os.lstat)(path).st_mode
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}; copy the directory again") from error
        if stat.S_ISLNK(mode):
            raise UsageError(f"{path}: must not be a link; copy the directory with cp -rL if you created the link")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: must be a regular file; copy the directory again")
        return path

    def read_text(self, name: str) -> str:
        """Read a small text file in UTF-8."""
        return read_text(self.place(name), "copy the directory again", LARGEST_TEXT)

    @functools.cached_property
    def sums(self) -> dict[str, str]:
        """The checksums by file name, read from a file in the format of the program sha256sum."""
        sums: dict[str, str] = {}
        for line in self.read_text(SUMS).splitlines():
            found = _LINE.fullmatch(line)
            if found is None or found[2] in sums:
                path = os.path.join(self.path, SUMS)
                raise UsageError(f"{path}: invalid line {line[:40]!r}; copy the directory again")
            sums[found[2]] = found[1]
        return sums

    def verified(self, name: str) -> str:
        """Return the path of the file *name* after its checksum was verified."""
        if name not in self.sums:
            path = os.path.join(self.path, SUMS)
            raise UsageError(f"{path}: has no checksum of {name}; copy the directory again")
        path = self.place(name)
        if checksum(path) != self.sums[name]:
            raise UsageError(f"{path}: corrupt, its sha256 differs from {SUMS}; copy it again")
        return path

    def names(self) -> list[str]:
        """Return the names of all files, without transformers' and the Hub's."""
        return sorted(name for name in os.listdir(self.path) if not _OTHERS.fullmatch(name))

    def refuse_others(self, names: Iterable[str]) -> None:
        """Reject other files than *names*; fairseq's hub reads sub-words from files with various names."""
        allowed = {CARD, CONFIG, SUMS, WEIGHTS, *names}
        for name in self.names() if not self.cached else ():
            if name not in allowed:
                path = os.path.join(self.path, name)
                raise UsageError(f"{path}: rejected: a package must not have a file of this name; move it elsewhere")
            self.place(name)


def find_problems(folder: str) -> list[str]:
    """Return the differences between the files in *folder* and their checksums; `load` checks the contents."""
    found, problems = Folder(folder), []
    try:
        problems += [f"{name!r} is not in {SUMS}" for name in found.names() if name not in (SUMS, *found.sums)]
    except UsageError as error:
        return [str(error)]
    for name in found.sums:
        try:
            found.verified(name)
        except UsageError as error:
            problems.append(str(error))
    return problems


def write_sums(folder: str) -> None:
    """Write the checksums of all other files in *folder*."""
    lines = [f"{checksum(os.path.join(folder, name))}  {name}\n" for name in sorted({*os.listdir(folder)} - {SUMS})]
    with open(os.path.join(folder, SUMS), "w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(lines)
