"""Resumable downloads of archives, with checks of their integrity.

A download is written to ``NAME.part``, and renamed only if its length, checksum (if known) and archive structure are
correct.
"""

import errno
import fnmatch
import gzip
import http.client
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display
from fairseq_deep.runtime.files import checksum

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TRIES = 4
BLOCK = 1 << 20
PARTIAL, RANGE_PAST_END = 206, 416


def read_checksums(path):
    """Return ``{name: checksum}`` of a file in the format of sha256sum or md5sum; empty for "none"."""
    if path == "none":
        return {}
    try:
        with open(path, encoding="utf-8") as stream:
            fields = [line.split() for line in stream if line.strip() and not line.startswith("#")]
    except OSError as problem:
        raise UsageError(f"--checksums {path}: {problem.strerror}") from None
    if any(len(pair) != 2 or not re.fullmatch("[0-9a-fA-F]{32}|[0-9a-fA-F]{64}", pair[0]) for pair in fields):
        raise UsageError(f"--checksums {path}: every line must be 'SHA256  NAME'")
    return {os.path.basename(name.lstrip("*")): digest.lower() for digest, name in fields}


def fetch(url, name, folder, checksums):
    """Return the path of ``name`` in ``folder``; it is downloaded from ``url`` if it does not exist.

    Raises:
        UsageError: the file cannot be downloaded, or it is damaged
    """
    path = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(path):  # perhaps the user's own copy
        problem = find_fault(path, checksums.get(name), name)
        if problem:
            raise UsageError(f"{path}: {problem}; delete it, or put a whole copy there")
    else:
        part = path + ".part"
        print(f"  fetching {url}", flush=True)
        download(url, part)
        problem = find_fault(part, checksums.get(name), name)
        if problem:
            os.remove(part)
            raise UsageError(
                f"{url}: {problem}; the download was deleted, run the same command again, give another --data-url,"
                " or skip the check with --checksums none"
            )
        if name not in checksums:
            print(f"  sha256 {checksum(part)} (not verified, no known checksum)", flush=True)
        os.rename(part, path)
    return path


def download(url, part):
    """Download ``url`` to ``part``, in several tries; each try resumes the previous one."""
    for attempt in range(1, TRIES + 1):
        try:
            stream_to_file(url, part)
            return
        except urllib.error.HTTPError as problem:
            if problem.code == RANGE_PAST_END:
                return
            reason = f"HTTP {problem.code} {problem.reason}"
            if problem.code < 500:
                break
        except (OSError, ValueError, http.client.HTTPException) as problem:
            reason = str(getattr(problem, "reason", problem))
            if getattr(problem, "errno", None) in NO_ROOM:
                raise UsageError(
                    f"{part}: {problem.strerror}; free disk space and run the same command again to resume"
                ) from None
            if url.startswith("file:"):
                break
        if attempt < TRIES:
            print(f"  {reason}; trying again", flush=True)
            time.sleep(2**attempt)
    raise UsageError(
        f"cannot download {url}: {reason}; run the same command again to resume,"
        f" put your own copy into {os.path.dirname(part)}, or use --data DIR"
    )


def stream_to_file(url, part):
    done = os.path.getsize(part) if os.path.exists(part) and not url.startswith("file:") else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        goes_on = done and response.status == PARTIAL
        done = done if goes_on else 0
        total = int(response.headers.get("Content-Length") or 0) + done
        with open(part, "ab" if goes_on else "wb") as stream:
            name = os.path.basename(part).removesuffix(".part")
            with Display() as display:
                for block in iter(lambda: response.read(BLOCK), b""):
                    stream.write(block)
                    done += len(block)
                    display.show(name, round(done / 1e6, 1), round(total / 1e6, 1), "MB")
    if total and done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")


def find_fault(path, expected=None, name=".tgz"):
    """Return the problem of an archive (empty, another checksum, or truncated); ``None`` if it is valid.

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
    return None


def ends_with(name, wanted):
    """Return whether the member ``name`` of an archive ends with the path pattern ``wanted`` (with ``*`` and ``?``)."""
    return fnmatch.fnmatchcase("/" + name, "*/" + wanted)


def extract(archive, members, folder):
    """Extract single files; ``members`` maps a new name to the end of the name in the archive.

    Returns the names that the archive does not contain.
    """
    missing = dict(members)
    with tarfile.open(archive) as stream:
        for entry in stream:
            for name, wanted in list(missing.items()):
                if entry.isfile() and ends_with(entry.name, wanted):
                    with open(os.path.join(folder, name), "wb") as target:
                        shutil.copyfileobj(stream.extractfile(entry), target)
                    del missing[name]
            if not missing:
                break
    return list(missing)
