"""A fast tokenizer for transformers that splits raw text like a SentencePiece model, with fairseq's indices.

The library tokenizers implements SentencePiece's two algorithms. The normaliser reproduces its other steps:

- The library's ``Precompiled`` step uses only short prefixes of characters with accents, and drops the rest. Therefore
  text is composed first (NFKC), and `SEPARATOR` separates accents that SentencePiece does not compose or reorder.
- A piece that looks like a special symbol, such as ``<s>``, must not be found in text. Therefore `LESS` replaces ``<``.
- SentencePiece merges adjacent unknown characters to one piece, and a dictionary can contain such pieces. Only complete
  runs may match them: `START` and `END` enclose each run.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.text import TAG

SPACE = "\u2581"
SEPARATOR, LESS, START, END, TAGGED, TILDE = (chr(0xFDD0 + number) for number in range(6))
"""Code points that Unicode reserves for internal use."""
LESS_BYTE = "<0x3C>"
OTHER = "<:"
"""Prefix of dictionary entries that the SentencePiece model never produces."""
MARKS, JOINERS = r"\p{M}", "\u200c\u200d"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of pieces in SentencePiece's format


class Pieces(NamedTuple):
    """A SentencePiece model.

    Attributes:
        unigram: whether the algorithm is unigram; otherwise BPE
        scores: {piece: score}
        bytes: byte pieces for unknown characters; empty without byte fallback
        charsmap: its normalisation
        prefix: whether sentences begin with `SPACE`
        strip: whether repeated blanks are reduced to one
    """

    unigram: bool
    scores: dict[str, float]
    bytes: list[str]
    charsmap: bytes
    prefix: bool
    strip: bool

    @property
    def alphabet(self) -> set[str]:
        """Characters that are pieces."""
        return {piece for piece in self.scores if len(piece) == 1}


def read_pieces(path: str) -> Pieces:
    """Read the model in the file at *path*.

    Raises:
        UsageError: a package is missing, or the export does not support the model
    """
    try:
        from sentencepiece import sentencepiece_model_pb2 as form
    except ImportError as error:
        raise UsageError(f"{path} requires more packages ({error}): pip install sentencepiece protobuf") from error
    model = form.ModelProto()
    with open(path, "rb") as stream:
        model.ParseFromString(stream.read())  # already validated by the text steps
    trainer, normaliser = model.trainer_spec, model.normalizer_spec
    for problem, found in (
        ("words or characters as pieces", trainer.model_type not in (trainer.UNIGRAM, trainer.BPE)),
        ("pieces that the user has defined", any(piece.type == USER for piece in model.pieces)),
        ("blanks at the end of pieces", trainer.treat_whitespace_as_suffix),
        ("blanks that are not escaped", not normaliser.escape_whitespaces),
    ):
        if found:
            raise UsageError(f"{path} has {problem}, which the export does not support: use 'fairseq-deep package'")
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    fallback = [piece.piece for piece in model.pieces if piece.type == BYTE] if trainer.byte_fallback else []
    return Pieces(trainer.model_type == trainer.UNIGRAM, scores, fallback, normaliser.precompiled_charsmap,
                  normaliser.add_dummy_prefix, normaliser.remove_extra_whitespaces)  # fmt: skip


def make_vocabulary(symbols: Sequence[str], pieces: Pieces) -> tuple[dict[str, int], list[int]]:
    """Return the ids of all pieces, and the dictionary entries of ids after the dictionary: ``<unk>``.

    Args:
        symbols: the entries of the dictionary by index, including the four special symbols

    Raises:
        UsageError: an entry occurs twice, or tags are not supported
    """
    names = [_name(symbol, pieces) if index > 3 else symbol for index, symbol in enumerate(symbols)]
    vocabulary = {name: index for index, name in enumerate(names)}
    if len(vocabulary) < len(symbols):
        raise UsageError("a dictionary in which an entry occurs twice")
    if not pieces.prefix and tags_of(symbols):
        raise UsageError("target-language tags and sub-words without a blank at the beginning, which the export does "
                         "not combine: use 'fairseq-deep package'")  # fmt: skip
    for piece in (*pieces.bytes, *pieces.scores):
        vocabulary.setdefault(_name(piece, pieces), len(vocabulary))
    meanings = [3] * (len(vocabulary) - len(symbols))
    if pieces.bytes and "<" not in pieces.scores:  # "<" becomes a byte
        byte = vocabulary[LESS_BYTE]
        vocabulary[LESS] = len(vocabulary)
        meanings.append(byte if byte < len(symbols) else 3)
    return vocabulary, meanings


def tags_of(symbols: Sequence[str]) -> list[str]:
    """Return the target-language tags in a dictionary."""
    return [symbol for symbol in symbols[4:] if TAG.fullmatch(symbol)]


def _name(symbol: str, pieces: Pieces) -> str:
    if symbol in pieces.scores:
        return symbol.replace("<", LESS)
    if symbol in pieces.bytes or TAG.fullmatch(symbol):
        return symbol
    if pieces.prefix and not pieces.bytes and not pieces.alphabet & {*symbol}:  # a run of unknown characters
        return START + symbol.replace("<", LESS) + END
    return OTHER + symbol


def make_core(vocabulary: dict[str, int], pieces: Pieces, tags: Sequence[str], blanks: str) -> Any:
    """Return the tokenizer, without special symbols.

    Args:
        vocabulary: see `make_vocabulary`
        tags: target-language tags
        blanks: regular expression for the separators of words
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    runs = [name for name in vocabulary if name.startswith(START)]
    fallback = {"byte_fallback": bool(pieces.bytes)}
    known = {piece.replace("<", LESS): score for piece, score in pieces.scores.items()}
    if pieces.unigram:
        lowest = min(known.values())  # determines the cost of an unknown character
        scores = [(name, 0.0 if name in runs else known.get(name, lowest)) for name in vocabulary]
        core = Tokenizer(models.Unigram(scores, unk_id=3, **fallback))
    else:
        core = Tokenizer(models.BPE(vocabulary, _merges(known), unk_token="<unk>", fuse_unk=True,
                                    ignore_merges=bool(runs), **fallback))  # fmt: skip
        if runs:
            core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{START}[^{END}]*{END}"), "isolated")
    core.normalizer = _normaliser(pieces, tags, blanks, bool(runs))
    core.decoder = _decoder(bool(pieces.bytes))
    return core


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece; SentencePiece merges the piece with the best score first."""
    found = []
    for piece in sorted(scores, key=scores.get, reverse=True):
        pairs = ((piece[:place], piece[place:]) for place in range(1, len(piece)))
        found += [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    return found


def _normaliser(pieces: Pieces, tags: Sequence[str], blanks: str, runs: bool) -> Any:
    from tokenizers import Regex, normalizers

    replace = normalizers.Replace
    steps = [replace(Regex(blanks), " "), normalizers.Strip(), *([marked_tag(tags)] if tags else ())]
    if pieces.charsmap:
        apart, closed = _separations()
        steps += [replace("\uff5e", TILDE), *(replace(Regex(place), SEPARATOR) for place in apart)]
        steps += [normalizers.NFKC(), replace(TILDE, "\uff5e"), replace(Regex(closed), SEPARATOR)]
        steps += [normalizers.Precompiled(pieces.charsmap), replace(SEPARATOR, "")]
    if pieces.strip:
        steps += [replace(Regex(" {2,}"), " "), normalizers.Strip()]
    steps.append(replace("<", LESS))
    steps += [normalizers.Prepend(SPACE)] * pieces.prefix
    steps.append(replace(" ", SPACE))
    if runs:
        unknown = _class((letter.replace("<", LESS) for letter in pieces.alphabet), "^")
        steps += [replace(Regex(f"(?<={unknown})(?!{unknown})"), END)]
        steps += [replace(Regex(f"(?<!{unknown})(?={unknown})"), START)]
    return normalizers.Sequence(steps)


def marked_tag(tags: Sequence[str]) -> Any:
    """Return the step that marks one of *tags* at the beginning of a text; elsewhere, tags are plain text."""
    from tokenizers import Regex, normalizers

    languages = "|".join(re.escape(tag[2:]) for tag in tags)
    return normalizers.Replace(Regex(f"^<2(?=(?:{languages}))"), TAGGED)


def _decoder(fallback: bool) -> Any:
    from tokenizers import Regex, decoders

    steps = [decoders.ByteFallback()] * fallback
    for sign, text in ((START, ""), (END, ""), (TAGGED, "<2")):
        steps.append(decoders.Replace(sign, text))
    steps += [decoders.Replace(Regex(f"^{OTHER}"), ""), decoders.Replace(LESS, "<"), decoders.Replace(SPACE, " ")]
    return decoders.Sequence([*steps, decoders.Fuse(), decoders.Replace(Regex(r"^\s+|\s+$"), "")])


@cache
def _separations() -> tuple[list[str], str]:
    """Return the places to insert `SEPARATOR`: before NFKC, and before ``Precompiled``.

    The library tokenizers fails on insertions at the beginning of a text, so the patterns exclude this place.
    """
    composed, together = set(), defaultdict(set)
    for letter in map(chr, range(0x110000)):
        parts = unicodedata.normalize("NFD", letter)
        if unicodedata.normalize("NFKD", letter) != letter and not _is_mark(letter):
            composed.add(letter)
        for first, second in zip(parts, parts[1:]):
            if _is_mark(first) and _is_mark(second):
                together[first].add(second)
    groups = defaultdict(set)
    for first, seconds in together.items():
        groups[frozenset(seconds)].add(first)
    kept = "|".join(sorted(f"(?<={_class(firsts)}){_class(seconds)}" for seconds, firsts in groups.items()))
    before = [f"(?<=[{MARKS}])(?=[{MARKS}])(?!{kept})", f"(?<={_class(composed)})(?=[{MARKS}])"]
    return before, f"(?<=.)(?=[{MARKS}{JOINERS}])"


def _is_mark(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "M"


def _class(letters: Iterable[str], negated: str = "") -> str:
    """Return a regular expression for the class of *letters*."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, letters)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    spans = (rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in ranges)
    return f"[{negated}{''.join(spans)}]"
