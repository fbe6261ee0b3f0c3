"""Single layers with the flags of fairseq: their description, their inputs, their call."""

import argparse

import torch
from fairseq.models.transformer import TransformerConfig, base_architecture

from fairseq_deep.core.layers import DecoderContext, DecoderLayer, ParallelDecoderLayer
from tests.helpers.tensors import DOUBLE

T, S, B, C, E, F = 6, 5, 3, 16, 24, 40  # E: width of a memory that is not the decoder's
# unused copies in the encoder layers of fairseq 0.12.2
DUPLICATES = {f"{matrix}_{part}" for matrix in ("in_proj", "out_proj", "fc1", "fc2") for part in ("weight", "bias")}


def config(pre_norm=False, encoder_dim=C, **flags):
    flags = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, **flags}
    for side, dim in (("encoder", encoder_dim), ("decoder", C)):
        flags.update({f"{side}_embed_dim": dim, f"{side}_ffn_embed_dim": F, f"{side}_attention_heads": 2,
                      f"{side}_normalize_before": pre_norm})  # fmt: skip
    args = argparse.Namespace(**flags)
    base_architecture(args)
    return TransformerConfig.from_namespace(args)


def padding(length, masked):
    """B x length; *masked*: for the second and third sentence, how many positions of it (None: no mask)."""
    if masked is None:
        return None
    mask = torch.zeros(B, length, dtype=torch.bool)
    for sentence, count in enumerate(masked, start=1):
        mask[sentence, slice(count) if count > 0 else slice(length + count, None)] = True
    return mask


def encoder_inputs(masked=None):
    return torch.randn(T, B, C, **DOUBLE), {"encoder_padding_mask": padding(T, masked)}


def decoder_inputs(dim=C, masked=None, target_masked=None):
    mask = torch.full((T, T), float("-inf"), **DOUBLE).triu(1)
    memory = None if dim is None else torch.randn(S, B, dim, requires_grad=True, **DOUBLE)
    return torch.randn(T, B, C, **DOUBLE), {
        "encoder_out": memory,
        "encoder_padding_mask": None if dim is None else padding(S, masked),
        "self_attn_mask": mask,
        "self_attn_padding_mask": padding(T, target_masked),
    }


def inputs(side):
    return encoder_inputs() if side == "encoder" else decoder_inputs()


def call(layer, x, need_head_weights=False, **options):
    """Run a layer of ours or fairseq's with the names of fairseq's arguments."""
    if not isinstance(layer, (DecoderLayer, ParallelDecoderLayer)):
        return layer(x, **options)
    ours = {"encoder_out": "memory", "encoder_padding_mask": "memory_padding", "self_attn_mask": "mask",
            "self_attn_padding_mask": "padding", "incremental_state": "cache"}  # fmt: skip
    return layer(x, DecoderContext(**{ours[name]: value for name, value in options.items()}), need_head_weights)
