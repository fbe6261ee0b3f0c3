"""Conversion between raw text and sub-words: sacremoses, jieba (Chinese), subword-nmt, SentencePiece.

Recipes prepare training text with the same functions (:func:`tokenizer_of`, :func:`cutter_of`).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fairseq_deep.core.language_tags import TAG as LANGUAGE_TAG
from fairseq_deep.errors import UsageError, one_line

from .language_codes import short_code

SEPARATOR = "@@"
CACHED = 5_000_000
"""Number of characters of text after which the cache of sub-words is cleared."""
SPACE = "\u2581"
TAG = re.compile(f"{LANGUAGE_TAG.pattern} ?")  # target-language tag before a source; sub-word models must not split it
FIRST = re.compile(r"\S+ ?")
CHECKED = 2000
"""Number of entries of a dictionary that are compared with the sub-words."""
HAN = re.compile("[\u4e00-\u9fff]")
BYTES = re.compile(r"(?<!\S)<0x[0-9A-F]{2}>( <0x[0-9A-F]{2}>)*(?!\S)")  # SentencePiece's byte fallback


def tokenizer_of(
    lang: str, kind: str = "moses", lowercase: bool = False, is_tag: Callable[[str], Any] = LANGUAGE_TAG.fullmatch
) -> Callable[[str], str]:
    """Return the function that splits a raw line into words, separated by blanks; it keeps a tag.

    Args:
        kind: "moses" or "none"
        is_tag: see :func:`keeping_tag`

    Raises:
        UsageError: a package is missing
    """
    segment = tokenize = None
    if kind == "moses":
        with packages_named():
            from sacremoses import MosesTokenizer

            tokenize = MosesTokenizer(short_code(lang)).tokenize
            if short_code(lang) == "zh":
                import jieba

                jieba.setLogLevel("WARNING")
                segment = jieba.cut

    def prepare(line: str) -> str:
        line = line.lower() if lowercase else line
        if segment is not None:
            line = " ".join(segment(line))
        if tokenize is not None:
            line = tokenize(line, return_str=True)
        return " ".join(line.split())

    return keeping_tag(prepare, is_tag)


def keeping_tag(step: Callable[[str], str], is_tag: Callable[[str], Any]) -> Callable[[str], str]:
    """Return *step* with an exception: tags at the beginning of lines do not change.

    Args:
        is_tag: whether the first token of a line is a tag
    """

    def keep(line: str) -> str:
        found = (match for match in (TAG.match(line), FIRST.match(line)) if match)
        tag = next((match for match in found if is_tag(match[0].rstrip(" "))), None)
        return step(line) if tag is None else f"{tag[0].rstrip(' ')} {step(line[tag.end() :])}".rstrip(" ")

    return keep


def cutter_of(codes: str, is_tag: Callable[[str], Any] = LANGUAGE_TAG.fullmatch) -> Callable[[str], str]:
    """Return the function that splits words into sub-words; it keeps a tag.

    Args:
        codes: file with subword-nmt merges, or a SentencePiece model (.model)
        is_tag: see :func:`keeping_tag`

    Raises:
        UsageError: a package is missing, or the file cannot be read
    """
    return keeping_tag(_read_codes(codes), is_tag)


def _read_codes(codes: str) -> Merges | Pieces:
    with packages_named():
        return Pieces(codes) if is_pieces(codes) else Merges(codes)


def is_part(symbol: str) -> bool:
    """Return whether a symbol is a sub-word of subword-nmt or SentencePiece, not a word."""
    return symbol.endswith(SEPARATOR) or len(symbol) > 1 and symbol.startswith(SPACE)


def is_one_token(word: str) -> bool:
    """Return whether *word* can be a tag. For "No.", the next word decides whether Moses splits it."""
    return word.isalnum() or "_" in word or not (word[0].isalnum() or word[-1].isalnum())


def is_pieces(codes: str) -> bool:
    """Return whether the file is a SentencePiece model."""
    return codes.endswith(".model")


@contextlib.contextmanager
def packages_named(install: str = "") -> Iterator[None]:
    """Report a missing package with the command that installs it.

    Args:
        install: arguments of ``pip install`` (default: the package)
    """
    try:
        yield
    except ImportError as error:
        name = (error.name or install).partition(".")[0]
        raise UsageError(
            f"{name} is not installed ({error}); pip install {install or name.replace('_', '-')}"
        ) from error


FILLER = re.compile(r"madeupword\d{4}")
"""Entries that fairseq adds to a dictionary until its size is a multiple of 8."""


class TextSteps:
    """Text processing before and after a model.

    Args:
        codes: file with subword-nmt merges, or a SentencePiece model (.model); None: no sub-words
        tokenizer: "moses" or "none"
        lowercase: whether the source is lowercased first
        symbols: the source dictionary without special symbols. A first token that is one of them stays whole, such as
            the tag of a target language; a piece of SentencePiece is a tag only in the form <2..>. None: only tags of
            this form stay whole

    Attributes:
        kind: "subword-nmt" or "sentencepiece"; None: tokens are words
        doubt: why the sub-words may not be those of the model; "" if they fit

    Raises:
        UsageError: a package is missing, the sub-words cannot be read or do not fit *symbols*, or *symbols* are of
            Chinese text that was not segmented
    """

    def __init__(
        self, source_lang: str, target_lang: str, codes: str | None, tokenizer: str = "moses", lowercase=False,
        symbols: Sequence[str] | None = None,
    ):  # fmt: skip
        cut, known = None if codes is None else _read_codes(codes), frozenset(symbols or ())
        pieces = cut if isinstance(cut, Pieces) else ()

        def is_tag(word: str) -> bool:
            if LANGUAGE_TAG.fullmatch(word):
                return symbols is None or word in known
            return word in known and is_one_token(word) and word not in pieces

        self.doubt = "" if cut is None or symbols is None else check_fit(codes, cut, symbols)
        if tokenizer == "moses" and short_code(source_lang) == "zh":
            check_segmented(symbols or ())
        self.tokenize = tokenizer_of(source_lang, tokenizer, lowercase, is_tag)
        self.cut = None if cut is None else keeping_tag(cut, is_tag)
        self.kind = None if codes is None else "sentencepiece" if is_pieces(codes) else "subword-nmt"
        self.detokenizer = None
        if tokenizer == "moses":
            from sacremoses import MosesDetokenizer

            self.detokenizer = MosesDetokenizer(short_code(target_lang))

    def prepare(self, line: str) -> str:
        """Return the tokens of a raw line, separated by blanks."""
        line = self.tokenize(line)
        return line if self.cut is None else self.cut(line)

    def tags(self, symbols: Iterable[str]) -> list[str]:
        """Return the entries of *symbols* that stay whole only at the beginning of lines."""
        before = self.prepare("a")
        words = (symbol for symbol in symbols if not is_part(symbol) and not FILLER.fullmatch(symbol))
        whole = (word for word in words if self.prepare(word) == word)
        return [symbol for symbol in whole if self.prepare(f"a {symbol}") != f"{before} {symbol}"]

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
        return re.sub(r"[\r\n]+", " ", line.replace(" ", "").replace(SPACE, " ")).strip()
    return (line + " ").replace(f"{SEPARATOR} ", "").rstrip() if kind == "subword-nmt" else line


def _decode_bytes(units: re.Match[str]) -> str:
    return bytes(int(unit[1:-1], 16) for unit in units[0].split()).decode(errors="replace")


class Merges:
    """Splits the words of a line with the merges of subword-nmt.

    Attributes:
        alphabet: characters of the merges

    Raises:
        UsageError: the file is not valid
    """

    def __init__(self, path: str):
        from subword_nmt.apply_bpe import BPE

        said = io.StringIO()
        try:
            with open(path, encoding="utf-8-sig") as stream, contextlib.redirect_stderr(said):
                self.merges = BPE(stream, separator=SEPARATOR)
        except (OSError, ValueError, IndexError, SystemExit) as error:  # the library prints and exits on a bad line
            problem = one_line(said.getvalue() or error)
            raise UsageError(f"{path}: not a valid file of subword-nmt merges: {problem}") from error
        if self.merges.version not in ((0, 1), (0, 2)):  # the library would fail only at the first word
            version = ".".join(map(str, self.merges.version))
            problem = f"{path} has merges of version {version}; subword-nmt supports 0.1 and 0.2"
            raise UsageError(f"{problem}: learn them again")
        self.alphabet = {*"".join(part for pair in self.merges.bpe_codes for part in pair).replace("</w>", "")}
        self.known = 0

    def __call__(self, line: str) -> str:
        self.known += len(line)
        if self.known > CACHED:  # the library's cache of words grows without limit
            self.merges.cache.clear()
            self.known = len(line)
        return self.merges.process_line(line)


class Pieces:
    """Splits a line into the pieces of a SentencePiece model; ``in`` tests whether a token is one.

    Attributes:
        alphabet: characters of the pieces

    Raises:
        UsageError: the file is not a SentencePiece model
    """

    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor

        try:
            self.model = SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{path}: not a valid SentencePiece model: {one_line(error)}") from error
        self.alphabet = {*"".join(map(self.model.id_to_piece, range(self.model.vocab_size())))}

    def __call__(self, line: str) -> str:
        return " ".join(self.model.encode(line, out_type=str))

    def __contains__(self, token: str) -> bool:
        """Whether *token* is in the model, or consists of characters that are not."""
        return self.model.piece_to_id(token) != self.model.unk_id() or token in self(token).split()


def check_fit(codes: str, cut: Merges | Pieces, symbols: Sequence[str]) -> str:
    """Reject sub-words that the model was not trained with.

    The words of the dictionary are split again. The sub-words of the model turn almost none of them into unknown
    tokens, another SentencePiece model a tenth to a half, and another kind of sub-words more than nine tenths.
    Other merges leave most tokens known, but split words that the model's own merges keep.
    Tags, placeholders and words with other characters, such as a target language's, do not count.

    Returns:
        a warning if merges split more than a tenth of the words, or ""

    Raises:
        UsageError: more than a tenth of the words become unknown tokens
    """
    known = frozenset(symbols)
    words = [symbol[1:] for symbol in symbols if symbol.startswith(SPACE) and len(symbol) > 1]
    words = words or [symbol for symbol in symbols if not symbol.endswith(SEPARATOR)]
    words = [word for word in words if word.isalnum() and not word.startswith("madeupword")]
    words = [word for word in words if cut.alphabet.issuperset(word)] or words
    words = words[:: len(words) // CHECKED + 1]
    found = [cut(word).split() for word in words]
    broken = sum(not known.issuperset(parts) for parts in found)
    if 10 * broken > len(words):
        raise UsageError(
            f"{codes} does not fit the source dictionary: {broken} of {len(words)} words become unknown tokens; give "
            "the sub-words that the model was trained with (--bpe-codes)"
        )
    split = sum(len(parts) > 1 for parts in found) if isinstance(cut, Merges) else 0
    if 10 * split <= len(words):
        return ""
    return (
        f"{codes} splits {split} of {len(words)} words of the source dictionary: unless source and target have merges "
        "of their own, the model was trained with others; give these (--bpe-codes)"
    )


def check_segmented(symbols: Sequence[str]) -> None:
    """Reject a model of Chinese text that jieba did not segment, since Moses split it into characters.

    Raises:
        UsageError: no symbol has several Chinese characters, or continues in the next sub-word
    """
    chinese = [symbol for symbol in symbols if HAN.match(symbol)]
    if chinese and max(map(len, chinese)) == 1:
        raise UsageError(
            "the source dictionary has only single Chinese characters, so the model was trained on text without "
            "segmentation: give tokenised text in single characters, with --tokenizer none"
        )
