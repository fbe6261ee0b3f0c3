"""Safe reading of archives, FASTA files and splits: no files outside the directory, no shell, no empty split."""

import atexit
import os
import shutil
import tarfile
import tempfile

import numpy as np
from fairseq.safe_load import CheckpointError


def check_sentences(path):
    """Check that the data file `path` of a binarised split is not empty.

    Raises:
        CheckpointError: it is empty
    """
    if os.path.getsize(path) == 0:
        raise CheckpointError(f"{path}: no sentences; binarise text with sentences, or name another split")


def unpack(archive, replace):
    """Unpack a tar archive and return the directory of its content.

    Args:
        archive: path of the archive
        replace: replace the archive by the directory, as for a download in the cache; otherwise the directory is
            temporary and is removed at exit

    Raises:
        CheckpointError: the archive is truncated, has members other than files and directories, or has a member with a
            path outside the archive
    """
    folder = tempfile.mkdtemp(prefix="fairseq-model-", dir=os.path.dirname(archive) if replace else None)
    if not replace:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:*") as opened:
            members = [checked(member, archive) for member in opened]
            if sum(member.size for member in members) > shutil.disk_usage(folder).free:
                raise CheckpointError(f"{archive}: the unpacked content is larger than the free space in {folder}")
            opened.extractall(folder, members)
        names = [member.name if member.isdir() else os.path.dirname(member.name) for member in members]
        top = os.path.join(folder, os.path.commonpath(names) if names else "")
        if not replace:
            return top
        os.remove(archive)
        os.rename(top, archive)
        return archive
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # tarfile's message has a line per compression method
        raise CheckpointError(f"{archive}: not a complete tar archive of a model ({reason})") from error
    finally:
        if replace:
            shutil.rmtree(folder, ignore_errors=True)


def checked(member, archive):
    """Return `member` with default permissions, if it is a file or directory with a path inside the archive."""
    name = member.name
    if not (member.isreg() or member.isdir()):
        raise CheckpointError(f"{archive}: rejected, because {name!r} is neither a file nor a directory")
    if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{archive}: rejected, because the path {name!r} is outside the archive")
    member.mode = 0o755 if member.isdir() else 0o644
    if hasattr(os, "getuid"):  # not on Windows
        member.uid, member.gid = os.getuid(), os.getgid()
    member.uname = member.gname = ""
    return member


def fasta_index(path):
    """Return the offset in bytes and the number of letters of each sequence in a FASTA file."""
    offsets, sizes, place = [], [], 0
    with open(path, "rb") as stream:
        for line in stream:
            if line.startswith(b">"):
                offsets.append(place)
                sizes.append(0)
            elif sizes:
                sizes[-1] += len(line.decode().strip())
            place += len(line)
    return np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)
