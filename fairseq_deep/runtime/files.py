"""Checksums of files."""

import hashlib


def checksum(path: str, kind: str = "sha256") -> str:
    """Return the checksum of a file as hexadecimal digits (``hashlib.file_digest`` requires Python 3.11).

    Args:
        kind: an algorithm of :mod:`hashlib`, such as "md5"
    """
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
