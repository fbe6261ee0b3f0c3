"""Checkpoints, models of every structure with the files that an export needs, and sub-words."""

import argparse
import io
from collections import OrderedDict

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_deep.plugin.architectures import get_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.models import task_of, tiny_flags
from tests.helpers.paths import PACKAGE
from tests.helpers.tensors import shake

SIZES = {"encoder_layers": 2, "decoder_layers": 3, "max_source_positions": 32, "max_target_positions": 32}
GENERATE = ["--user-dir", PACKAGE, "--beam", "3", "--lenpen", "0.8", "--max-len-a", "1", "--max-len-b", "50", "--cpu"]
EMPTY = ("._float_tensor", ".version")  # entries of a state that are no weights


def checkpoint(path, model, **others):
    """Save *model* at *path* the way fairseq does, and return the path as text."""
    state = {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="transformer_x"), "checkpoint": {}},
        "model": OrderedDict(model),
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": {"state": {}},
        **others,
    }
    torch.save(state, path)
    return str(path)


def write_model(folder, name, dictionaries, languages=("src", "tgt"), **flags):
    """Save a model with random norms and biases as folder/model.pt, its dictionaries beside it; return the model.

    Args:
        name: of the architecture, without ``transformer_``
        dictionaries, languages: of source and target
    """
    arch = f"transformer_{name}"
    flags = {**tiny_flags(arch), **SIZES, **flags}
    for language, dictionary in zip(languages, dictionaries):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    langs = dict(zip(("source_lang", "target_lang"), languages))
    args = argparse.Namespace(arch=arch, task="translation", **langs, **flags)
    get_architecture(arch).apply(args)
    model = DeepTransformerModel.build_model(args, task_of(*dictionaries)).eval()
    with torch.no_grad():
        for part, value in [*model.encoder.layers.named_parameters(), *model.decoder.layers.named_parameters()]:
            varies = value.dim() == 1 or "layer_norm" in part  # which may have a row for each language
            value.copy_(value + 0.3 * torch.randn_like(value) if varies else 2 * value)
    if model.encoder.language_transform is not None:
        shake(model.encoder.language_transform, 0.3, around=True)
    checkpoint(folder / "model.pt", model.state_dict(), cfg=convert_namespace_to_omegaconf(args))
    return model


def learn_merges(path, lines, merges):
    """Write *merges* of subword-nmt, learned from *lines*, to *path*."""
    from subword_nmt.learn_bpe import learn_bpe

    with open(path, "w", encoding="utf-8") as stream:
        learn_bpe(io.StringIO("\n".join(lines) + "\n"), stream, merges)


def dictionary_of(lines, threshold=0):
    """fairseq's dictionary of the units in *lines* that occur that often."""
    dictionary = Dictionary()
    for line in lines:
        for word in line.split():
            dictionary.add_symbol(word)
    dictionary.finalize(threshold=threshold, padding_factor=1)
    return dictionary


def learn_pieces(path, lines, **options):
    """Write a model of SentencePiece, in which some characters are unknown, to *path*."""
    import sentencepiece as spm

    settings = {"vocab_size": 500, "character_coverage": 0.999, "hard_vocab_limit": False, "minloglevel": 2, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(path)[: -len(".model")], **settings)
