"""Models on the meta device: an architecture of this package, and fairseq's own transformer of the same sizes."""

import argparse
import contextlib
import types
from unittest import mock

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

import fairseq_deep  # noqa: F401  registers the architectures
from fairseq_deep.core.registry import UsageError, nearest

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# look-ups, and what fairseq's own encoder layers hold a second time for inference on a CPU
NO_PRODUCTS = ("embed_tokens", "embed_positions", "in_proj_weight", "out_proj_weight", "fc1_weight", "fc2_weight")
SAME_IN_STOCK = (
    *(f"{side}_{name}" for side in ("encoder", "decoder")
      for name in ("layers", "embed_dim", "attention_heads", "normalize_before", "learned_pos")),
    "dropout", "attention_dropout", "activation_dropout", "checkpoint_activations", "layernorm_embedding",
)  # fmt: skip


def make_dictionary(words):
    """A dictionary of that size, of which the first hundred entries are language tags."""
    dictionary = Dictionary()
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(f"<2l{index}>" if index < 100 else str(index))
    return dictionary


def read_flags(arch, flags):
    """The flags of a model as fairseq would have them after its command line."""
    if arch not in ARCH_MODEL_REGISTRY:
        raise UsageError(f"unknown architecture {arch}{nearest(arch, ARCH_MODEL_REGISTRY)}: see fairseq-deep archs")
    parser = argparse.ArgumentParser(prog=arch)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    given = {
        name: value
        for name, value in vars(parser.parse_args(flags)).items()
        if value is not None and value is not False
    }
    args = argparse.Namespace(arch=arch, share_all_embeddings=True, **given)
    if not hasattr(args, "dropout"):
        args.dropout = 0.1
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def stock_flags(args):
    """The flags of fairseq's ``transformer`` with the depth, the widths and the norms of *args*."""
    same = {name: getattr(args, name) for name in SAME_IN_STOCK if hasattr(args, name)}
    for side in ("encoder", "decoder"):  # a depth-wise LSTM has no feed-forward sub-layers
        same[f"{side}_ffn_embed_dim"] = getattr(args, f"{side}_ffn_embed_dim", 0) or 4 * same[f"{side}_embed_dim"]
    stock = argparse.Namespace(arch="transformer", share_all_embeddings=True, **same)
    ARCH_CONFIG_REGISTRY["transformer"](stock)
    return stock


def build(args, dictionary, dtype, device="meta"):
    """The model of *args*: on the meta device without values, elsewhere freshly initialised."""
    cls = TransformerModel if args.arch == "transformer" else ARCH_MODEL_REGISTRY[args.arch]
    pads_right = types.SimpleNamespace(left_pad_target=False)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=pads_right)
    no_apex = mock.patch.object(torch.cuda, "is_available", lambda: False)  # its norms do not run on meta
    with torch.device(device), no_apex if device == "meta" else contextlib.nullcontext():
        model = cls.build_model(args, task)
    for part in model.modules():
        if isinstance(getattr(part, "weights", None), torch.Tensor):  # sinusoidal positions are no buffer
            part.weights = part.weights.to(device)
    model = model.to(device)
    return {torch.float16: model.half, torch.bfloat16: model.bfloat16, torch.float32: model.float}[dtype]()


def name_of(args):
    """Depth and norms of fairseq's transformer, for its row."""
    norms = "pre-norm" if args.encoder_normalize_before else "post-norm"
    return f"stock {norms} {args.encoder_layers} + {args.decoder_layers}"


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def _matrices(module, *without):
    """Elements of all matrices of products but those whose name has one of *without*."""
    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and not any(part in name for part in (*NO_PRODUCTS, *without))
    )


def _width(model):
    return model.decoder.embed_tokens.embedding_dim


def _projection(model):
    return model.decoder.embed_tokens.num_embeddings * _width(model)


def training_flops(model, tokens, length):
    """Flops of a training step on paper: 6 a word and parameter, and attention over *length* words."""
    layers = model.encoder.num_layers + 2 * model.decoder.num_layers
    attention = 3 * 4 * length * _width(model) * layers
    return tokens * (6 * (_matrices(model, "output_projection") + _projection(model)) + attention)


def decoding_flops(model, hypotheses, step, length):
    """Flops of a step of decoding on paper; keys and values of the source are there."""
    cached = ("encoder_attn.k_proj", "encoder_attn.v_proj")
    attention = 4 * (step + length) * _width(model) * model.decoder.num_layers
    products = 2 * (_matrices(model.decoder, "output_projection", *cached) + _projection(model))
    return hypotheses * (products + attention)
