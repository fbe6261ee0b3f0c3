"""A small vocabulary, narrow models of every architecture, models at full size, small batches."""

import argparse

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, base_architecture

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.plugin.architectures import ARCHITECTURES, build_architecture

VOCAB = 40
PRENORM, POSTNORM = "transformer_prenorm_2l2l_tiny", "transformer_postnorm_2l2l_tiny"
TINY = {"pre": PRENORM, "post": POSTNORM}


def tiny_flags(name, dim=16):
    """Flags that make the architecture *name* narrow, with *dim* features; its depth and structure stay."""
    flags = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    row = ARCHITECTURES[name]
    for side, width in (("encoder", dim), ("decoder", dim * 3 // 2 if row.encoder_size else dim)):
        flags.update({f"{side}_embed_dim": width, f"{side}_attention_heads": 2})
        if AGGREGATORS.get(row.layer_agg).layout(side, dict(row.options)).feed_forward:
            flags[f"{side}_ffn_embed_dim"] = 2 * dim
    return flags


def make_dictionary(entries, prefix="w"):
    """A dictionary of that size, special symbols included."""
    symbols = Dictionary()
    for index in range(entries - len(symbols)):
        symbols.add_symbol(f"{prefix}{index}")
    return symbols


def make_tagged_dictionary(entries, languages):
    """A dictionary of that size, of which the last entries are the tags of languages: <2l0>, <2l1>, ..."""
    symbols = make_dictionary(entries - languages)
    for index in range(languages):
        symbols.add_symbol(f"<2l{index}>")
    return symbols


def make_batch(dictionary, lengths=(5, 7, 3), target_lengths=(4, 6, 6), left_pad=True):
    """Random sentence pairs: source (padded on the left unless told otherwise), its lengths, target input."""
    longest = max(lengths)
    source = torch.full((len(lengths), longest), dictionary.pad())
    for row, length in enumerate(lengths):
        words = torch.randint(dictionary.nspecial, len(dictionary), (length,))
        source[row, longest - length if left_pad else 0 :][:length] = words
    target = torch.full((len(target_lengths), max(target_lengths)), dictionary.pad())
    for row, length in enumerate(target_lengths):
        target[row, 0] = dictionary.eos()
        target[row, 1:length] = torch.randint(dictionary.nspecial, len(dictionary), (length - 1,))
    return source, torch.tensor(lengths), target


def task_of(source, target=None):
    """What a model is built for, as far as it looks: both dictionaries."""
    return argparse.Namespace(source_dictionary=source, target_dictionary=source if target is None else target)


def fairseq_transformer(dictionary, norm="postnorm", kind=TransformerModel, **flags):
    """fairseq's own Transformer with these flags."""
    norms = {f"{side}_normalize_before": norm == "prenorm" for side in ("encoder", "decoder")}
    args = argparse.Namespace(**{**norms, **flags})
    base_architecture(args)
    return kind.build_model(args, task_of(dictionary))


def strengthen(model):
    """Give matrices weights that make words and sources matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)


def full_size(name, entries, **flags):
    """The architecture *name*, as wide as it is, with a vocabulary of that size; its weights are not initialised."""
    with skip_initialisation():
        return build_architecture(name, make_dictionary(entries), **flags)


def size_of(model):
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
