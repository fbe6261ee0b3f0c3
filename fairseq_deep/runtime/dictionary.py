"""fairseq's dictionaries: from words to indices and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fairseq_deep.errors import UsageError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class Dictionary:
    """The words of one language, in their order.

    Args:
        words: without the four special symbols, which come first

    Attributes:
        symbols: all symbols by their index
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
        """Read a file of fairseq-preprocess: a word and its count per line.

        Raises:
            UsageError: a line is not a word and a count, or a word occurs twice; names the line
        """
        dictionary = cls()
        try:
            with open(path, encoding="utf-8") as stream:
                for number, line in enumerate(stream, 1):
                    dictionary._add(line.rstrip("\n").rstrip(), f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: must be UTF-8 ({error.reason}); copy it again") from error
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
        return dictionary

    def _add(self, line: str, where: str) -> None:
        """Add the word of a *line*, ``word count`` or ``word count #fairseq:overwrite``."""
        word, _, count = line.rpartition(" ")
        overwrites = count == "#fairseq:overwrite"
        if overwrites:
            word, _, count = word.rpartition(" ")
        if not word or not count.lstrip("-").isdigit():
            raise UsageError(f"{where}: must be a word and its count; copy the dictionary again")
        if word in self.indices and not overwrites:
            raise UsageError(f"{where}: {word!r} occurs twice; remove a line, or mark it with #fairseq:overwrite")
        self.indices[word] = len(self.symbols)
        self.symbols.append(word)

    def encode(self, line: str) -> Tensor:
        """The indices of the words in *line* and of end-of-sentence, T + 1."""
        words = [self.indices.get(word, self.unk) for word in line.split()]
        return torch.tensor([*words, self.eos])

    def decode(self, indices: Sequence[int]) -> list[str]:
        """The words at *indices*, without beginning and end of sentence."""
        return [self.symbols[index] for index in indices if index not in (self.bos, self.eos)]
