"""Checksums of files."""

import hashlib


def sha256(path: str) -> str:
    """Return the SHA-256 checksum of a file as hexadecimal digits (``hashlib.file_digest`` requires Python 3.11)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
