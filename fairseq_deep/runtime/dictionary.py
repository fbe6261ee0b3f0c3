"""fairseq's dictionaries: conversion between tokens and indices."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.errors import UsageError

from .files import read_text

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class Dictionary:
    """The ordered tokens of one language.

    Args:
        words: all tokens except the four special symbols, which come first

    Attributes:
        symbols: all tokens by index
    """

    bos, pad, eos, unk = range(4)

    def __init__(self, words: Iterable[str] = ()):
        self.symbols = [*SPECIAL, *words]
        self.indices = {symbol: index for index, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    __hash__ = None

    @classmethod
    def load(cls, path: str) -> Dictionary:
        """Read a file of fairseq-preprocess: a token and its count per line.

        Raises:
            UsageError: the file cannot be read, a line is not a token and a count, or a token occurs twice
        """
        dictionary = cls()
        text = read_text(path, "see --data").removeprefix("\ufeff")
        for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
            dictionary._add(line.rstrip(), f"{path}:{number}")
        return dictionary

    def _add(self, line: str, where: str) -> None:
        """Add the token of a *line*, ``token count`` or ``token count #fairseq:overwrite``."""
        word, _, count = line.rpartition(" ")
        overwrites = count == "#fairseq:overwrite"
        if overwrites:
            word, _, count = word.rpartition(" ")
        if not word or not count.lstrip("-").isdigit():
            raise UsageError(f"{where}: must be a token and its count; copy the dictionary again")
        if word in self.indices and not overwrites:
            raise UsageError(f"{where}: {word[:40]!r} occurs twice; remove one, or mark it with #fairseq:overwrite")
        self.indices[word] = len(self.symbols)
        self.symbols.append(word)

    def encode(self, line: str) -> Tensor:
        """Return the indices of the tokens in *line*, followed by end-of-sentence, T + 1."""
        return torch.tensor([*(self.indices.get(word, self.unk) for word in line.split()), self.eos])

    def decode(self, indices: Sequence[int]) -> str:
        """Return the tokens at *indices*, without beginning and end of sentence."""
        return " ".join(self.symbols[index] for index in indices if index not in (self.bos, self.eos))


def hash_symbols(symbols: Sequence[str]) -> str:
    """Return the size of a dictionary and a hash of its ordered tokens."""
    total = hashlib.sha256("\n".join(symbols).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(symbols)} entries, sum {total[:12]}"


def check_hashes(own: dict[str, str], saved: Any, fix: str) -> None:
    """Reject a model that was trained with other dictionaries: its embeddings belong to other tokens.

    Args:
        own: hashes by side ("source", "target")
        saved: hashes in the checkpoint; None if it has none
        fix: a fix for the user; the error ends with it

    Raises:
        UsageError: the hashes of a side differ
    """
    for side, now in own.items() if isinstance(saved, dict) else ():
        before = saved.get(side, now)
        if before != now:
            raise UsageError(
                f"the checkpoint was trained with another {side} dictionary ({before}) than the data's ({now}): {fix}"
            )
