"""Archives of models and FASTA files, read without writing elsewhere and without a shell."""

import atexit
import os
import shutil
import tarfile
import tempfile

import numpy as np
from fairseq.safe_load import CheckpointError


def unpack(archive, replace):
    """The folder that the tar file `archive` holds.

    Args:
        replace: whether the folder takes the place of the archive, as for a download in the cache; otherwise the
            archive stays, and the folder is a temporary one that goes when Python ends

    Raises:
        CheckpointError: it is no whole archive, holds anything but files and folders, or names a place outside itself
    """
    folder = tempfile.mkdtemp(prefix="fairseq-model-", dir=os.path.dirname(archive) if replace else None)
    if not replace:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:*") as opened:
            members = [checked(member, archive) for member in opened]
            if sum(member.size for member in members) > shutil.disk_usage(folder).free:
                raise CheckpointError(f"{archive}: unpacked it is larger than the free space in {folder}")
            opened.extractall(folder, members)
        names = [member.name if member.isdir() else os.path.dirname(member.name) for member in members]
        top = os.path.join(folder, os.path.commonpath(names) if names else "")
        if not replace:
            return top
        os.remove(archive)
        os.rename(top, archive)
        return archive
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # tarfile has a line for each kind of compression
        raise CheckpointError(f"{archive}: not a whole tar archive of a model ({reason})") from error
    finally:
        if replace:
            shutil.rmtree(folder, ignore_errors=True)


def checked(member, archive):
    """`member` with plain permissions, if it is a file or folder with a name inside of the archive."""
    name = member.name
    if not (member.isreg() or member.isdir()):
        raise CheckpointError(f"{archive}: refused, because {name!r} is neither a file nor a folder")
    if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{archive}: refused, because {name!r} is a place outside of the archive")
    member.mode = 0o755 if member.isdir() else 0o644
    if hasattr(os, "getuid"):  # Windows has no owners of this kind
        member.uid, member.gid = os.getuid(), os.getgid()
    member.uname = member.gname = ""
    return member


def fasta_index(path):
    """Where each sequence of a FASTA file begins, in bytes, and its number of letters."""
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
