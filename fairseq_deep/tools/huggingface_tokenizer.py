"""Tokenizer files for transformers that map tokenised text to fairseq's indices.

With SentencePiece, they are a ``MarianTokenizer``: its SentencePiece models, and the dictionary as ``vocab.json``. It
keeps a tag whole in Marian's form only, so ``>>de<<`` also names the entry ``<2de>``.

With merges, they are a fast tokenizer: A token ``xy@@`` of subword-nmt becomes ``xy``, and ``xy`` becomes ``xy</w>``. A
part of a merge that is not in the dictionary needs its own id after the dictionary. It means ``<unk>``, like all
unknown words, or an existing entry if two names denote the same token (the word ``@@@@`` and the prefix ``@@``).
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

from fairseq_deep.core.language_tags import TAG
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
from fairseq_deep.runtime.text import SEPARATOR, Merges, is_pieces

END = "</w>"
BLANKS = r"[\s\x1c-\x1f]+"
"""White space as in Python's ``str.split()``."""
VERSION = (0, 2)
CONFIG = "tokenizer_config.json"
TAGGED = chr(0xFDD4)
"""A code point that Unicode reserves for internal use; it marks a tag at the beginning of a text."""
OTHER_TAG = re.compile(r"[^\w&].*[^\W\d_].*|__.*")
"""Tags such as >>de<< and __de__, but not @-@, &quot; and words that other steps of a corpus joined."""
MARIAN_TAG = re.compile(r">>.*<<")
SETTINGS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
            "padding_side": "right", "split_special_tokens": True, "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip


def tags_of(symbols: Sequence[str]) -> list[str]:
    """Return the target-language tags in a dictionary."""
    return [symbol for symbol in symbols[len(SPECIAL) :] if TAG.fullmatch(symbol)]


def check_tags(trained: Any) -> None:
    """Raise `UsageError` if the dictionary of the model has tags that its tokenizer would split.

    Args:
        trained: see `Trained`
    """
    known = [TAG, MARIAN_TAG] if trained.steps.kind == "sentencepiece" else [TAG]
    for tag in trained.steps.tags(trained.loaded.source.symbols[len(SPECIAL) :]):
        if OTHER_TAG.fullmatch(tag) and not any(form.fullmatch(tag) for form in known):
            raise UsageError(f"the tokenizer for transformers keeps only tags such as <2de> whole, and would split "
                             f"{tag} of {trained.path}: use --format torch, or train with such tags")  # fmt: skip


def read_merges(path: str | None) -> list[tuple[str, str]] | None:
    """Return the distinct subword-nmt merges in the file at *path*; None for words and SentencePiece.

    Raises:
        UsageError: transformers' tokenizers do not support the file
    """
    if path is None or is_pieces(path):
        return None
    merges = Merges(path).merges
    if merges.version != VERSION:
        version = ".".join(map(str, merges.version))
        raise UsageError(f"{path} has merges of version {version}; transformers supports only 0.2: learn them again")
    return sorted(merges.bpe_codes, key=merges.bpe_codes.get)


def make_vocabulary(symbols: list[str], merges: list[tuple[str, str]] | None) -> tuple[dict[str, int], list[int]]:
    """Return the ids of all pieces, and the dictionary entries of ids after the dictionary.

    Args:
        symbols: the distinct entries of the dictionary by index, including the four special symbols
        merges: see `read_merges`

    Raises:
        UsageError: two entries cannot be distinguished
    """
    indices = {symbol: index for index, symbol in enumerate(symbols)}
    if merges is None:
        return indices, []
    whole = {*SPECIAL, *tags_of(symbols)}
    vocabulary = {symbol if symbol in whole else piece_of(symbol): index for index, symbol in enumerate(symbols)}
    meanings: list[int] = []
    for piece in dict.fromkeys(part for pair in merges for part in (*pair, "".join(pair))):
        if piece in whole:
            raise UsageError(f"merges that form {piece}, a special symbol")
        if piece not in vocabulary:
            vocabulary[piece] = len(symbols) + len(meanings)
            meanings.append(indices.get(symbol_of(piece), Dictionary.unk))
    if len(vocabulary) < len(symbols) + len(meanings):
        raise UsageError("a dictionary with entries that a BPE tokenizer cannot distinguish")
    return vocabulary, meanings


def piece_of(symbol: str) -> str:
    """Return the piece of a BPE tokenizer for an entry of a dictionary."""
    return symbol[: -len(SEPARATOR)] if symbol.endswith(SEPARATOR) and symbol != SEPARATOR else symbol + END


def symbol_of(piece: str) -> str:
    """Return the entry of a dictionary for a piece of a BPE tokenizer."""
    return piece[: -len(END)] if piece.endswith(END) else piece + SEPARATOR


def save_tokenizer(folder: str, symbols: list[str], codes: str | None, longest: int) -> None:
    """Write the files of a tokenizer to the directory.

    Args:
        symbols: the entries of the dictionary
        codes: merges or SentencePiece model; None: tokens are words
        longest: maximum number of tokens in a source, including end-of-sentence
    """
    os.makedirs(folder, exist_ok=True)
    merges, tags = read_merges(codes), tags_of(symbols)
    vocabulary, _ = make_vocabulary(symbols, merges)
    settings = {**SETTINGS, "model_max_length": longest}
    if codes and is_pieces(codes):
        for side in ("source", "target"):
            shutil.copyfile(codes, os.path.join(folder, f"{side}.spm"))
        marks = {f">>{tag[2:-1]}<<": vocabulary[tag] for tag in tags}
        _write_json(os.path.join(folder, "vocab.json"), {**marks, **vocabulary})
        settings["tokenizer_class"] = "MarianTokenizer"
    else:
        from transformers import PreTrainedTokenizerFast

        core = _make_core(vocabulary, merges, tags)
        PreTrainedTokenizerFast(tokenizer_object=core, **settings).save_pretrained(folder)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 also supports it
    _write_json(os.path.join(folder, CONFIG), settings)


def _make_core(vocabulary: dict[str, int], merges: list[tuple[str, str]] | None, tags: Sequence[str]) -> Any:
    """Return the fast tokenizer of words, or of merges; a tag at the beginning of a text is a token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if merges is None:
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    else:
        core = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", end_of_word_suffix=END, fuse_unk=False)
        )
        core.decoder = decoders.Sequence([decoders.Replace("<unk>", f"<unk>{END}"), decoders.BPEDecoder(END)])
        if tags:
            languages = "|".join(re.escape(tag[2:]) for tag in tags)
            mark = normalizers.Replace(Regex(f"^<2(?=(?:{languages}))"), TAGGED)
            core.normalizer = normalizers.Sequence([normalizers.Strip(), mark])
            core.add_tokens([AddedToken(tag, special=False, normalized=True) for tag in tags])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(BLANKS), "removed")
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", Dictionary.eos)]
    )
    return core


def _write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
