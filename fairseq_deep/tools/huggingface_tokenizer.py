"""Tokenizer files for transformers that give fairseq's indices for tokenised text.

A unit ``xy@@`` of subword-nmt is ``xy`` there, and ``xy`` is ``xy</w>``. A part of a merge that the dictionary lacks
needs an id of its own, behind the dictionary; it means ``<unk>`` as all unknown words do. What a unit is called twice
(the word ``@@@@`` and the beginning ``@@``), it means that entry. Models of SentencePiece are in `huggingface_pieces`.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from fairseq_deep.runtime.text import SEPARATOR, is_pieces
from fairseq_deep.tools import UsageError, huggingface_pieces
from fairseq_deep.tools.huggingface_pieces import Pieces, read_pieces, tags_of

END = "</w>"
BLANKS = r"[\s\x1c-\x1f]+"
"""What Python's ``str.split()`` splits at."""
VERSION = (0, 2)
CONFIG = "tokenizer_config.json"


def read_subwords(path: str) -> list[tuple[str, str]] | Pieces:
    """Return the merges of subword-nmt in the file at *path*, each once, or the model of SentencePiece.

    Raises:
        UsageError: no tokenizer of transformers does the same
    """
    if is_pieces(path):
        return read_pieces(path)
    from subword_nmt.apply_bpe import BPE

    with open(path, encoding="utf-8") as stream:
        merges = BPE(stream, separator=SEPARATOR)
    if merges.version != VERSION:
        version = ".".join(map(str, merges.version))
        raise UsageError(f"{path} has merges of version {version}; transformers computes 0.2 only: learn them again")
    return sorted(merges.bpe_codes, key=merges.bpe_codes.get)


def make_vocabulary(
    symbols: list[str], subwords: list[tuple[str, str]] | Pieces | None
) -> tuple[dict[str, int], list[int]]:
    """Return the ids of all pieces, and what the ids behind the dictionary mean.

    Args:
        symbols: the entries of the dictionary by index, with the four special ones
        subwords: see `read_subwords`; None: words are units

    Raises:
        UsageError: two entries cannot be told apart
    """
    if isinstance(subwords, Pieces):
        return huggingface_pieces.make_vocabulary(symbols, subwords)
    indices: dict[str, int] = {}
    for index, symbol in enumerate(symbols):
        if symbol in indices:
            raise UsageError(f"a dictionary in which {symbol[:40]!r} occurs twice")
        indices[symbol] = index
    if subwords is None:
        return indices, []
    whole = {*symbols[:4], *tags_of(symbols)}
    vocabulary = {symbol if symbol in whole else piece_of(symbol): index for index, symbol in enumerate(symbols)}
    meanings: list[int] = []
    for piece in dict.fromkeys(part for pair in subwords for part in (*pair, "".join(pair))):
        if piece in whole:
            raise UsageError(f"merges that make {piece}, which is a special symbol")
        if piece not in vocabulary:
            vocabulary[piece] = len(symbols) + len(meanings)
            meanings.append(indices.get(symbol_of(piece), 3))
    if len(vocabulary) < len(symbols) + len(meanings):
        raise UsageError("a dictionary with entries that a BPE tokenizer cannot tell apart")
    return vocabulary, meanings


def piece_of(symbol: str) -> str:
    """Return the piece of a BPE tokenizer for an entry of a dictionary."""
    return symbol[: -len(SEPARATOR)] if symbol.endswith(SEPARATOR) and symbol != SEPARATOR else symbol + END


def symbol_of(piece: str) -> str:
    """Return the entry of a dictionary for a piece of a BPE tokenizer."""
    return piece[: -len(END)] if piece.endswith(END) else piece + SEPARATOR


def make_tokenizer(
    vocabulary: dict[str, int], subwords: list[tuple[str, str]] | Pieces | None, longest: int, tags: Sequence[str] = ()
) -> Any:
    """Return transformers' fast tokenizer.

    Args:
        vocabulary, subwords: see `make_vocabulary`
        longest: most tokens of a source, its end included
        tags: of target languages; one at the beginning of a text is a token
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    if isinstance(subwords, Pieces):
        core = huggingface_pieces.make_core(vocabulary, subwords, tags, BLANKS)
    else:
        core = _make_core(vocabulary, subwords, tags)
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    if subwords is not None:  # the normaliser marks a tag at the beginning, also of these
        core.add_tokens([AddedToken(tag, special=False, normalized=True) for tag in tags])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **names, padding_side="right", split_special_tokens=True, model_max_length=longest,
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def _make_core(vocabulary: dict[str, int], merges: list[tuple[str, str]] | None, tags: Sequence[str]) -> Any:
    """Return the tokenizer of words, or of merges, without special symbols."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if merges is None:
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    else:
        core = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", end_of_word_suffix=END, fuse_unk=False)
        )
        core.decoder = decoders.Sequence([decoders.Replace("<unk>", f"<unk>{END}"), decoders.BPEDecoder(END)])
        if tags:
            core.normalizer = normalizers.Sequence([normalizers.Strip(), huggingface_pieces.marked_tag(tags)])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(BLANKS), "removed")
    return core


def save_tokenizer(tokenizer: Any, folder: str) -> None:
    """Write *tokenizer* to the folder, under the name of its class that transformers 4 knows, too."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save_pretrained(folder)
    path = os.path.join(folder, CONFIG)
    with open(path, encoding="utf-8") as stream:
        config = json.load(stream)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        json.dump(config, stream, indent=2, sort_keys=True)
        stream.write("\n")
