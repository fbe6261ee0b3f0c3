"""Tokenizer files for transformers that map tokenised text to fairseq's indices.

A token ``xy@@`` of subword-nmt becomes ``xy``, and ``xy`` becomes ``xy</w>``. A part of a merge that is not in the
dictionary needs its own id after the dictionary. It means ``<unk>``, like all unknown words, or an existing entry if
two names denote the same token (the word ``@@@@`` and the prefix ``@@``). For SentencePiece, see `huggingface_pieces`.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.text import SEPARATOR, Merges, is_pieces
from fairseq_deep.tools import huggingface_pieces
from fairseq_deep.tools.huggingface_pieces import Pieces, read_pieces, tags_of

END = "</w>"
BLANKS = r"[\s\x1c-\x1f]+"
"""White space as in Python's ``str.split()``."""
VERSION = (0, 2)
CONFIG = "tokenizer_config.json"


def read_subwords(path: str) -> list[tuple[str, str]] | Pieces:
    """Return the distinct subword-nmt merges in the file at *path*, or the SentencePiece model.

    Raises:
        UsageError: transformers' tokenizers do not support the file
    """
    if is_pieces(path):
        return read_pieces(path)
    merges = Merges(path).merges
    if merges.version != VERSION:
        version = ".".join(map(str, merges.version))
        raise UsageError(f"{path} has merges of version {version}; transformers supports only 0.2: learn them again")
    return sorted(merges.bpe_codes, key=merges.bpe_codes.get)


def make_vocabulary(
    symbols: list[str], subwords: list[tuple[str, str]] | Pieces | None
) -> tuple[dict[str, int], list[int]]:
    """Return the ids of all pieces, and the dictionary entries of ids after the dictionary.

    Args:
        symbols: the entries of the dictionary by index, including the four special symbols
        subwords: see `read_subwords`; None: tokens are words

    Raises:
        UsageError: two entries cannot be distinguished
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
            raise UsageError(f"merges that form {piece}, a special symbol")
        if piece not in vocabulary:
            vocabulary[piece] = len(symbols) + len(meanings)
            meanings.append(indices.get(symbol_of(piece), 3))
    if len(vocabulary) < len(symbols) + len(meanings):
        raise UsageError("a dictionary with entries that a BPE tokenizer cannot distinguish")
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
        longest: maximum number of tokens in a source, including end-of-sentence
        tags: target-language tags; a tag at the beginning of a text is a token
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
    if subwords is not None:  # normalized, since the normaliser marks tags at the beginning
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
    """Write *tokenizer* to the directory, with a class name that transformers 4 also supports."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save_pretrained(folder)
    path = os.path.join(folder, CONFIG)
    with open(path, encoding="utf-8") as stream:
        config = json.load(stream)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        json.dump(config, stream, indent=2, sort_keys=True)
        stream.write("\n")
