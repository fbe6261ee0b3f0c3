"""Conversion between raw text and sub-words: sacremoses, jieba (Chinese), subword-nmt, SentencePiece.

Recipes prepare training text with the same functions (:func:`tokenizer_of`, :func:`cutter_of`).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Container

from fairseq_deep.core.language_tags import TAG as LANGUAGE_TAG
from fairseq_deep.errors import UsageError, one_line

SEPARATOR = "@@"
CACHED = 5_000_000
"""Number of characters of text after which the cache of sub-words is cleared."""
TAG = re.compile(f"{LANGUAGE_TAG.pattern} ?")  # target-language tag before a source; sub-word models must not split it
BYTES = re.compile(r"(?<!\S)<0x[0-9A-F]{2}>( <0x[0-9A-F]{2}>)*(?!\S)")  # SentencePiece's byte fallback


def tokenizer_of(
    lang: str, kind: str = "moses", lowercase: bool = False, tags: Container[str] | None = None
) -> Callable[[str], str]:
    """Return the function that splits a raw line into words, separated by blanks; it keeps a language tag.

    Args:
        kind: "moses" or "none"
        tags: symbols; only a tag that is one of them stays whole; None: any tag

    Raises:
        UsageError: a package is missing
    """
    segment = tokenize = None
    if kind == "moses":
        with packages_named():
            from sacremoses import MosesTokenizer

            tokenize = MosesTokenizer(lang).tokenize
            if lang == "zh":
                import jieba

                jieba.setLogLevel("WARNING")
                segment = jieba.cut

    def prepare(line: str) -> str:
        tag, words = TAG.match(line), []
        if tag and (tags is None or tag[0].strip() in tags):
            words, line = [tag[0].strip()], line[tag.end() :]
        line = line.lower() if lowercase else line
        if segment is not None:
            line = " ".join(segment(line))
        if tokenize is not None:
            line = tokenize(line, return_str=True)
        return " ".join([*words, *line.split()])

    return prepare


def cutter_of(codes: str) -> Callable[[str], str]:
    """Return the function that splits words into sub-words; it does not split a language tag at the beginning.

    Args:
        codes: file with subword-nmt merges, or a SentencePiece model (.model)

    Raises:
        UsageError: a package is missing, or the file cannot be read
    """
    with packages_named():
        cut = _read_pieces(codes) if is_pieces(codes) else _read_merges(codes)

    def keep_tag(line: str) -> str:
        tag = TAG.match(line)
        return tag[0] + cut(line[tag.end() :]) if tag else cut(line)

    return keep_tag


def is_part(symbol: str) -> bool:
    """Return whether a symbol is a sub-word of subword-nmt or SentencePiece, not a word."""
    return symbol.endswith(SEPARATOR) or len(symbol) > 1 and symbol.startswith("\u2581")


def is_pieces(codes: str) -> bool:
    """Return whether the file is a SentencePiece model."""
    return codes.endswith(".model")


@contextlib.contextmanager
def packages_named():
    """Report a missing package with the command that installs it."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: pip install {error.name.replace('_', '-')}") from error


class TextSteps:
    """Text processing before and after a model.

    Args:
        codes: file with subword-nmt merges, or a SentencePiece model (.model); None: no sub-words
        tokenizer: "moses" or "none"
        lowercase: whether the source is lowercased first
        symbols: the source dictionary; a language tag that it lacks is split like other text

    Attributes:
        kind: "subword-nmt" or "sentencepiece"; None: tokens are words

    Raises:
        UsageError: a package is missing, or the merges cannot be read
    """

    def __init__(
        self, source_lang: str, target_lang: str, codes: str | None, tokenizer: str = "moses", lowercase=False,
        symbols: Container[str] | None = None,
    ):  # fmt: skip
        self.tokenize = tokenizer_of(source_lang, tokenizer, lowercase, symbols)
        self.cut = None if codes is None else cutter_of(codes)
        self.kind = None if codes is None else "sentencepiece" if is_pieces(codes) else "subword-nmt"
        self.detokenizer = None
        if tokenizer == "moses":
            from sacremoses import MosesDetokenizer

            self.detokenizer = MosesDetokenizer(target_lang)

    def prepare(self, line: str) -> str:
        """Return the tokens of a raw line, separated by blanks."""
        line = self.tokenize(line)
        return line if self.cut is None else self.cut(line)

    def finish(self, line: str) -> str:
        """Return the raw text of the tokens in *line*; sub-words are joined like fairseq's ``--remove-bpe``."""
        line = joined(line, self.kind)
        return line if self.detokenizer is None else self.detokenizer.detokenize(line.split())


def joined(line: str, kind: str | None) -> str:
    """Join the tokens in *line* to words.

    Args:
        kind: kind of sub-words, as in :class:`TextSteps`
    """
    if kind == "sentencepiece":
        line = BYTES.sub(_decode_bytes, line)
        return re.sub(r"[\r\n]+", " ", line.replace(" ", "").replace("\u2581", " ")).strip()
    return (line + " ").replace(f"{SEPARATOR} ", "").rstrip() if kind == "subword-nmt" else line


def _decode_bytes(units: re.Match[str]) -> str:
    return bytes(int(unit[1:-1], 16) for unit in units[0].split()).decode(errors="replace")


def _read_merges(path: str) -> Callable[[str], str]:
    from subword_nmt.apply_bpe import BPE

    said = io.StringIO()
    try:
        with open(path, encoding="utf-8") as stream, contextlib.redirect_stderr(said):
            merges = BPE(stream, separator=SEPARATOR)
    except (OSError, ValueError, IndexError, SystemExit) as error:  # the library prints and exits on an invalid line
        problem = one_line(said.getvalue() or error)
        raise UsageError(f"{path}: not a valid file of subword-nmt merges: {problem}") from error
    if merges.version not in ((0, 1), (0, 2)):  # the library would fail only at the first word
        version = ".".join(map(str, merges.version))
        raise UsageError(f"{path} has merges of version {version}; subword-nmt supports 0.1 and 0.2: learn them again")
    known = 0

    def cut(line: str) -> str:
        nonlocal known
        known += len(line)
        if known > CACHED:  # the library's cache of words grows without limit
            merges.cache.clear()
            known = len(line)
        return merges.process_line(line)

    return cut


def _read_pieces(path: str) -> Callable[[str], str]:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path}: not a valid SentencePiece model: {one_line(error)}") from error
    return lambda line: " ".join(model.encode(line, out_type=str))
