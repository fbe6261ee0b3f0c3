"""Import of a transformers model: flags, weights, dictionaries and sub-words."""

import os
from argparse import Namespace
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_deep.core.positions import sinusoids
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
from fairseq_deep.runtime.packaged import config as packaged
from fairseq_deep.runtime.records import Check, line, needed, optional, read_json, whole
from fairseq_deep.tools.huggingface_format import BART, FSMT, M2M100, MBART, MODEL_TYPES, NEVER, OFFSETS, PAD, UNK
from fairseq_deep.tools.huggingface_tokenizer import END, symbol_of, tags_of
from fairseq_deep.tools.input_text import read_lines

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate",
               "gelu_fast": "gelu_accurate", "tanh": "tanh", "linear": "linear", "silu": "swish", "swish": "swish",
               "relu2": "relu_squared"}  # fmt: skip
"""fairseq's names of activation functions by transformers' names."""
ARCH = "deep_transformer"
PIECES = ("sentencepiece.bpe.model", "source.spm")
"""SentencePiece models of M2M100's and Marian's tokenizers."""


VOCABULARY = {"*": whole(0, 1 << 31)}
FAST = {
    "vocab": needed(VOCABULARY),
    "merges": [Check("a pair of tokens", lambda pair: isinstance(_pair(pair), list) and len(_pair(pair)) == 2
                     and all(isinstance(part, str) for part in _pair(pair)))],
}  # fmt: skip
"""Schema of the model in a tokenizer.json."""


class Vocabularies(NamedTuple):
    """Vocabularies and sub-words of a directory.

    Attributes:
        source, target: fairseq's symbols by index, followed by symbols that exist only in the tokenizer
        subwords: name and content of the file with merges or the SentencePiece model; empty if tokens are words
    """

    source: list[str]
    target: list[str]
    subwords: dict[str, bytes]

    @property
    def pieces(self) -> bool:
        """Whether the sub-words are SentencePiece's."""
        return "spm.model" in self.subwords


def _read(path: str, schema: Any) -> dict[str, Any]:
    """Return the JSON object in the file at *path*.

    Raises:
        UsageError: the file is missing, too large or nested too deep, or does not match *schema*
    """
    found = read_json(path, schema, "copy the directory again")
    if not found:
        raise UsageError(f"{path}: missing or empty; give the directory of a model")
    return found


def check_kind(folder: str) -> str:
    """Return the ``model_type`` of the directory.

    Raises:
        UsageError: the type is not supported
    """
    kind = _read(os.path.join(folder, "config.json"), {"model_type": optional(line)}).get("model_type")
    if kind == packaged.HUGGINGFACE["model_type"]:
        raise UsageError(f"{folder} is a package of fairseq_deep: use it without import, for example in translate")
    if kind not in MODEL_TYPES:
        names = ", ".join(MODEL_TYPES)
        raise UsageError(f"{folder} has a model of the unsupported type {kind}: supported are {names}")
    return kind


def read_vocabularies(folder: str) -> Vocabularies:
    """Return the vocabularies and sub-words of the directory.

    Raises:
        UsageError: files are missing, or their kind of text processing is not supported
    """
    there = {name: os.path.join(folder, name) for name in os.listdir(folder)}
    if "tokenizer.json" in there:
        symbols, merges = _of_fast(there["tokenizer.json"])
        target = os.path.join(folder, "target", "tokenizer.json")
        return Vocabularies(symbols, _of_fast(target)[0] if os.path.isfile(target) else symbols, merges)
    if "vocab-src.json" in there:
        if "merges.txt" not in there:
            raise UsageError(f"{folder} has no merges.txt: copy it from the source of the model")
        lines = read_lines(there["merges.txt"])
        merges = [line.split()[:2] for line in lines if line.strip() and not line.startswith("#version")]
        sides = (_of_json(os.path.join(folder, f"vocab-{side}.json"), True) for side in ("src", "tgt"))
        return Vocabularies(*sides, _codes(merges))
    pieces = next((there[name] for name in PIECES if name in there), None)
    if "vocab.json" in there and pieces:
        other = os.path.join(folder, "target", "vocab.json")
        sides = (there["vocab.json"], other if os.path.isfile(other) else there["vocab.json"])
        with open(pieces, "rb") as stream:
            return Vocabularies(*(_of_json(path, False) for path in sides), {"spm.model": stream.read()})
    files = f"tokenizer.json, vocab-src.json with merges.txt, or vocab.json with {' or '.join(PIECES)}"
    raise UsageError(f"{folder} has no supported sub-words: it must have {files}")


def _of_fast(path: str) -> tuple[list[str], dict[str, bytes]]:
    """Return the symbols and the merges of a tokenizer.json."""
    model = _read(path, {"model": needed({"type": needed(line)})})["model"]
    cuts = model["type"] == "BPE"
    if model["type"] != "WordLevel" and not (cuts and model.get("end_of_word_suffix") == END):
        kind = "another kind of BPE" if cuts else model["type"]
        raise UsageError(f"{path} splits text by {kind}: supported are words, and BPE with {END} at the ends of words")
    model = _read(path, {"model": needed(FAST)})["model"]
    return _symbols(model["vocab"], path, cuts), _codes(map(_pair, model.get("merges", []))) if cuts else {}


def _of_json(path: str, cuts: bool) -> list[str]:
    return _symbols(_read(path, VOCABULARY), path, cuts)


def _pair(merge: Any) -> Any:
    """Return the parts of a merge, which are one string in older files."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _codes(merges: Iterable[list[str]]) -> dict[str, bytes]:
    lines = ("#version: 0.2", *map(" ".join, merges))
    return {"code": "".join(f"{line}\n" for line in lines).encode()}


def _symbols(vocabulary: dict[str, int], path: str, cuts: bool) -> list[str]:
    """Return fairseq's symbols by index; *cuts*: whether they are pieces of a BPE tokenizer."""
    names = {index: name for name, index in vocabulary.items()}  # of Marian's names for a tag, the last one
    missing = next((index for index in range(len(names)) if index not in names), None)
    if missing is not None:
        raise UsageError(f"{path} has no token with the index {missing}: each index must have one")
    pieces = [names[index] for index in range(len(names))]
    if pieces[: len(SPECIAL)] != [*SPECIAL]:
        raise UsageError(f"{path} must begin with {', '.join(SPECIAL)}, like fairseq's dictionaries")
    whole = {*SPECIAL, *tags_of(pieces)}
    return [symbol_of(piece) if cuts and piece not in whole else piece for piece in pieces]


def make_flags(config: Any, state: dict[str, Tensor]) -> Namespace:
    """Return the flags of the model in this package, except flags of the embedding tables.

    Args:
        config: transformers' configuration
        state: the weights by transformers' names
    """
    kind, activation = config.model_type, config.activation_function
    if activation not in ACTIVATIONS:
        raise UsageError(f"unsupported activation function {activation}: supported are {', '.join(ACTIVATIONS)}")
    pre, flags = kind not in (BART, FSMT), Namespace(arch=ARCH, _name=ARCH)
    for side in ("encoder", "decoder"):
        for name, value in (
            ("embed_dim", config.d_model), ("layers", getattr(config, f"{side}_layers")), ("normalize_before", pre),
            ("ffn_embed_dim", getattr(config, f"{side}_ffn_dim")), ("layerdrop", getattr(config, f"{side}_layerdrop")),
            ("attention_heads", getattr(config, f"{side}_attention_heads")),
            ("learned_pos", _positions(state, side, kind) == "learned"),
        ):  # fmt: skip
            setattr(flags, f"{side}_{name}", value)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        setattr(flags, name, getattr(config, name))
    flags.activation_fn = ACTIVATIONS[activation]
    flags.decoder_output_dim = flags.decoder_input_dim = config.d_model
    flags.layernorm_embedding = kind in (MBART, BART)
    flags.no_scale_embedding = not config.scale_embedding
    flags.no_token_positional_embeddings = _positions(state, "encoder", kind) == "none"
    flags.max_source_positions = flags.max_target_positions = config.max_position_embeddings
    flags.adaptive_softmax_cutoff, flags.adaptive_input = None, False
    return flags


def _positions(state: dict[str, Tensor], side: str, kind: str) -> str:
    """Return the kind of a stack's positions; a stored table may contain sinusoids, or zeros."""
    if kind in (M2M100, FSMT):
        return "sinusoidal"
    table = state[f"model.{side}.embed_positions.weight"][OFFSETS[kind] :]
    if not table.any():
        return "none"
    own = sinusoids(PAD + 1 + len(table), table.size(1), PAD)[PAD + 1 :]
    return "sinusoidal" if torch.allclose(table, own, rtol=0, atol=1e-6) else "learned"


def make_tensors(state: dict[str, Tensor], kind: str, flags: Namespace) -> dict[str, Tensor]:
    """Return the weights by this package's names, with complete embedding tables."""
    apart = ("shared.", "embed_positions.", "final_logits_bias", "lm_head.")
    tensors = {name.removeprefix("model."): value for name, value in state.items() if not any(p in name for p in apart)}
    if kind != FSMT:
        tensors["decoder.output_projection.weight"] = state["lm_head.weight"]
    for side in ("encoder", "decoder"):
        if getattr(flags, f"{side}_learned_pos"):
            table = state[f"model.{side}.embed_positions.weight"]
            above = table.new_zeros(PAD + 1 - OFFSETS[kind], table.size(1))
            tensors[f"{side}.embed_positions.weight"] = torch.cat([above, table])
    return tensors


def cut_tables(
    tensors: dict[str, Tensor], bias: Tensor | None, found: Vocabularies, flags: Namespace, folder: str
) -> tuple[Dictionary, Dictionary]:
    """Truncate the tables in *tensors* to the dictionaries, set the flags of the tables, and return the dictionaries.

    Rows at the end of the source table that equal the row of <unk> have no entry. Rows that the output bias excludes
    from generation are not in the target dictionary.

    Raises:
        UsageError: the vocabularies do not match the tables
    """
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    source, target, output = (tensors[name] for name in names)
    target_size = _audible(bias, len(output), folder)
    source_size = len(source)
    while source_size > len(SPECIAL) and torch.equal(source[source_size - 1], source[UNK]):
        source_size -= 1
    if found.pieces:  # language tokens, and fairseq's padding of the table
        more = [f"madeupword{index}" for index in range(len(found.source), max(source_size, target_size))]
        found = found._replace(source=found.source + more, target=found.target + more)
    for side, symbols, size in (("source", found.source, source_size), ("target", found.target, target_size)):
        if len(symbols) < size or side == "source" and len(symbols) > len(source):
            rows = len(source) if side == "source" else size
            raise UsageError(f"{folder} has {len(symbols)} {side} tokens, but a table of {rows} rows; copy it again")
    dictionaries = []
    for symbols, size in ((found.source, source_size), (found.target, target_size)):
        words = symbols[len(SPECIAL) : size]
        odd = next((word for word in words if not word or word.split() != [word]), None)
        if odd is not None or len({*words, *SPECIAL}) < len(words) + len(SPECIAL):
            raise UsageError(f"{folder} has tokens that dictionaries do not support ({odd!r})")
        dictionaries.append(Dictionary(words))
    same = dictionaries[0] == dictionaries[1]
    tied = torch.equal(target[:target_size], output[:target_size])
    flags.share_all_embeddings = same and tied and torch.equal(source[:source_size], target[:target_size])
    flags.share_decoder_input_output_embed = tied
    for name, size in zip(names, (source_size, target_size, target_size)):
        tensors[name] = tensors[name][:size].clone()
    return dictionaries[0], dictionaries[1]


def _audible(bias: Tensor | None, rows: int, folder: str) -> int:
    """Return the number of rows that can be generated: all rows, or the rows before the first with the bias `NEVER`."""
    if bias is None:
        return rows
    silent = bias.flatten() <= NEVER
    size = int(silent.logical_not().sum())
    if silent[:size].any() or bias.flatten()[:size].any():
        raise UsageError(f"{folder} has an output bias (final_logits_bias), which models of this package do not have")
    return size
