"""Resumable downloads of archives, with checks of their integrity.

A download is written to ``NAME.part``, and renamed only if its length, checksum (if known) and archive structure are
correct.
"""

from __future__ import annotations

import errno
import fnmatch
import gzip
import http.client
import os
import re
import shutil
import tarfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display
from fairseq_deep.recipes.options import EXAMPLES
from fairseq_deep.runtime.files import checksum

if TYPE_CHECKING:
    from fairseq_deep.recipes.plan import Plan

KNOWN = os.path.join(EXAMPLES, "common", "checksums.txt")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TRIES = 4
BLOCK = 1 << 20
PARTIAL, RANGE_PAST_END = 206, 416


class Downloads:
    """The archives of a recipe, downloaded on first use to the directory ``download`` of *plan*."""

    def __init__(self, plan: Plan):
        self.folder, self.url = plan.path("download"), plan.options.data_url.rstrip("/")
        path = plan.options.checksums or ("none" if self.url else KNOWN)  # a copy elsewhere may be packed differently
        self.checksums = {} if path == "none" else read_checksums(path)

    def get(self, address: str, name: str = "", digest: str = "") -> str:
        """Return the path of an archive.

        Args:
            name: name of the file; empty: as in the *address*
            digest: its sha256 or md5, if it is not in the file of checksums

        Raises:
            UsageError: the archive cannot be downloaded, or it is damaged
        """
        name = name or address.rsplit("/", 1)[-1]
        url, path = f"{self.url}/{name}" if self.url else address, os.path.join(self.folder, name)
        known = self.checksums.get(name, digest if self.checksums and not self.url else "")
        if os.path.exists(path):  # perhaps the user's own copy
            if problem := find_fault(path, known, name):
                raise UsageError(f"{path}: {problem}; delete it, or put a whole copy there")
            return path
        os.makedirs(self.folder, exist_ok=True)
        part = path + ".part"
        print(f"  fetching {url}", flush=True)
        download(url, part)
        if problem := find_fault(part, known, name):
            os.remove(part)
            raise UsageError(
                f"{url}: {problem}; the download was deleted, run the same command again, give another --data-url,"
                " or skip the check with --checksums none"
            )
        if not known:
            print(f"  sha256 {checksum(part)} (not verified, no known checksum)", flush=True)
        os.rename(part, path)
        return path


def read_checksums(path: str) -> dict[str, str]:
    """Return ``{name: checksum}`` of a file in the format of sha256sum or md5sum."""
    try:
        with open(path, encoding="utf-8") as stream:
            fields = [line.split() for line in stream if line.strip() and not line.startswith("#")]
    except OSError as problem:
        raise UsageError(f"--checksums {path}: {problem.strerror}") from None
    if any(len(pair) != 2 or not re.fullmatch("[0-9a-fA-F]{32}|[0-9a-fA-F]{64}", pair[0]) for pair in fields):
        raise UsageError(f"--checksums {path}: every line must be 'SHA256  NAME'")
    return {os.path.basename(name.lstrip("*")): digest.lower() for digest, name in fields}


def download(url: str, part: str) -> None:
    """Download *url* to *part*, in several tries; each try resumes the previous one."""
    for attempt in range(1, TRIES + 1):
        try:
            return stream_to_file(url, part)
        except (OSError, ValueError, http.client.HTTPException) as problem:
            status = getattr(problem, "code", 0)  # of HTTP
            if status == RANGE_PAST_END:
                return None
            if getattr(problem, "errno", None) in NO_ROOM:
                raise UsageError(
                    f"{part}: {problem.strerror}; free disk space and run the same command again to resume"
                ) from None
            reason = problem if status else getattr(problem, "reason", problem)
            if 400 <= status < 500 or url.startswith("file:"):
                break
        if attempt < TRIES:
            print(f"  {reason}; trying again", flush=True)
            time.sleep(2**attempt)
    raise UsageError(
        f"cannot download {url}: {reason}; run the same command again to resume,"
        f" put your own copy into {os.path.dirname(part)}, or use --data DIR"
    )


def stream_to_file(url: str, part: str) -> None:
    """Download *url* to *part*, which is continued if the server supports ranges."""
    done = os.path.getsize(part) if os.path.exists(part) and not url.startswith("file:") else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        goes_on = done and response.status == PARTIAL
        done = done if goes_on else 0
        total = int(response.headers.get("Content-Length") or 0) + done
        with open(part, "ab" if goes_on else "wb") as stream, Display() as display:
            for block in iter(lambda: response.read(BLOCK), b""):
                stream.write(block)
                done += len(block)
                name = os.path.basename(part).removesuffix(".part")
                display.show(name, round(done / 1e6, 1), round(total / 1e6, 1), "MB")
    if total and done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")


def find_fault(path: str, expected: str, name: str) -> str:
    """Return the problem of an archive (empty, another checksum, or truncated); empty if it is valid.

    Args:
        name: file name; its suffix determines the type: .tar, .gz (a single file), otherwise tar.gz
    """
    if not os.path.getsize(path):
        return "the file is empty"
    if expected:
        kind = "md5" if len(expected) == 32 else "sha256"
        found = checksum(path, kind)
        if found != expected.lower():
            return f"{kind} is {found}, not {expected.lower()}"
    plain, single = name.endswith(".tar"), name.endswith(".gz") and not name.endswith(".tar.gz")
    try:
        with (open if plain else gzip.open)(path, "rb") as stream:
            if not single:
                with tarfile.open(fileobj=stream, mode="r:") as archive:
                    for _ in archive:
                        pass
            while stream.read(BLOCK):  # gzip's own checksum comes last
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as problem:
        return f"truncated or invalid {'tar' if plain else 'gzip' if single else 'tar.gz'} archive ({problem})"
    return ""


def members(archive: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of all files in a tar archive."""
    with tarfile.open(archive) as stream:
        for entry in stream:
            if entry.isfile():
                yield entry.name, stream.extractfile(entry)


def ends_with(name: str, wanted: str) -> bool:
    """Return whether the member *name* of an archive ends with the path pattern *wanted* (with ``*`` and ``?``)."""
    return fnmatch.fnmatchcase("/" + name, "*/" + wanted)


def extract(archive: str, wanted: dict[str, str], folder: str) -> list[str]:
    """Extract single files, and return the names that the archive does not contain.

    Args:
        wanted: end of the name in the archive, by the new name in *folder*
    """
    missing = dict(wanted)
    for member, content in members(archive):
        for name in [name for name, end in missing.items() if ends_with(member, end)]:
            with open(os.path.join(folder, name), "wb") as target:
                shutil.copyfileobj(content, target)
            del missing[name]
        if not missing:
            break
    return [*missing]
