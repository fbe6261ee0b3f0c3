"""write a model for other programs: fairseq's `transformer`, transformers (Hugging Face), CTranslate2, torch.export

A trained model that differs from fairseq's only in depth or initialisation is a `transformer`, which stock fairseq
loads without --user-dir. Constant factors on branches (--residual completep, layerscale, layernorm-scaling, and prores
or branchnorm after their schedule) are folded into the weights; for transformers and CTranslate2, so are the weights of
DeepNet and Admin. Structures that the format does not support are rejected. The format torch supports all methods: it
stores the encoder and a decoding step as programs of torch.export in one file.
"""

import argparse
import os
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools import translate
from fairseq_deep.tools.alternatives import naming_others
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.checkpoints import check_fairseq, load_checkpoint, model_flags, save_checkpoint
from fairseq_deep.tools.flags import added
from fairseq_deep.tools.output_files import check_outputs

QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")
FORMATS = ("fairseq", "ctranslate2", "huggingface", "torch")
DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("data", "source_lang", "target_lang", "tokenizer", "lowercase")
OF_FORMATS = {
    **{name: ("ctranslate2", "huggingface", "torch") for name in (*PARTS, "bpe_codes")},
    "quantization": ("ctranslate2",),
    **{name: ("huggingface", "torch") for name in ("verify", "verify_sentences", "name", "licence")},
    **{name: ("torch",) for name in ("beam", "capacity", "dtype")},
}  # fmt: skip
"""The formats that support an option."""
TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
"""Modules that fairseq's flags can tie."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the output, and the options of each format."""
    parser.add_argument("checkpoint", metavar="MODEL", help="directory of a recipe, packaged model, or checkpoint")
    parser.add_argument("--output", required=True, metavar="PATH", help="checkpoint, file or new directory to write")
    parser.add_argument("--format", choices=FORMATS, default="fairseq", help="output format (default: fairseq)")
    group = parser.add_argument_group("with --format ctranslate2")
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="type of the weights (default: float32)")
    group = parser.add_argument_group("with --format torch")
    group.add_argument("--beam", type=at_least_one, metavar="N",
                       help="beam width of the programs (default: the recipe's, or 4)")  # fmt: skip
    room = "target positions in the caches (default: 256, or fewer if the model has fewer)"
    group.add_argument("--capacity", type=at_least_one, metavar="N", help=room)
    group.add_argument("--dtype", choices=DTYPES, help="type of the weights and caches (default: float32)")
    group = parser.add_argument_group("with --format huggingface or torch")
    group.add_argument("--verify", metavar="FILE", help="source text for the check (default: the recipe's test set)")
    group.add_argument("--verify-sentences", type=at_least_one, metavar="N",
                       help="number of sentences for the check (default: 200)")  # fmt: skip
    group.add_argument("--name", metavar="TEXT", help="model name on the card (default: the directory's name)")
    group.add_argument("--licence", "--license", metavar="TEXT", help="licence on the card, such as MIT or CC-BY-4.0")
    translate.add_parts(parser)


def run(args: argparse.Namespace) -> int:
    """Write the model in the chosen format."""
    for name, formats in OF_FORMATS.items():
        if getattr(args, name) is not None and args.format not in formats:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} requires --format {' or '.join(formats)}: add that, or omit {flag}")
    args.verify_sentences = args.verify_sentences or 200
    if args.format == "huggingface":
        from fairseq_deep.tools import huggingface_export

        return huggingface_export.write(args)
    if args.format == "torch":
        from fairseq_deep.tools import torch_format

        return torch_format.write(args)
    if args.format == "ctranslate2":
        from fairseq_deep.tools import ctranslate2_export

        return ctranslate2_export.write(args)
    return write_fairseq(args)


def write_fairseq(args: argparse.Namespace) -> int:
    """Write the checkpoint as fairseq's `transformer`, without optimizer state."""
    check_fairseq()
    from fairseq_deep.plugin.architectures import TWINS
    from fairseq_deep.plugin.stored import fill
    from fairseq_deep.runtime.plain import check_layers, check_weights

    check_outputs([args.output], [args.checkpoint])
    path = args.checkpoint
    if os.path.isdir(path):
        from fairseq_deep.runtime import find_bundle

        path = find_bundle(path).checkpoint
    state = load_checkpoint(path)
    stored = model_flags(state)
    arch = stored.get("arch") or stored.get("_name")
    if arch in TWINS.values():
        raise UsageError(f"{path} is already a model of fairseq ({arch}): use it without an export")
    flags = fill(stored, path)
    flags.encoder_embed_path = flags.decoder_embed_path = None
    with naming_others():
        check_layers(path, flags, "fairseq")
    model = loaded_model(path, state["model"], flags)
    with naming_others():
        check_weights(path, model, "fairseq")
        state["model"] = plain_weights(path, model, state["model"], flags)
    for name in own_flags():
        vars(flags).pop(name, None)
    flags.arch, flags.user_dir = "transformer", None
    if state.get("cfg"):
        flags._name = "transformer"
        state["cfg"]["model"] = flags
        _name_stock_parts(state["cfg"])
        if "common" in state["cfg"]:  # packaged models do not have these settings
            state["cfg"]["common"]["user_dir"] = None
    else:
        state["args"] = flags
    state.pop("last_optimizer_state", None)
    save_checkpoint(state, args.output)
    print(f"{path} -> {args.output}: a fairseq transformer")
    return 0


def _name_stock_parts(config: Any) -> None:
    """Replace our task, criterion, optimizer and scheduler by fairseq's, without our settings."""
    names = {
        "task": (
            ("deep_translation",), "translation", ("decode_precision", "decode_compile", "gnmt_lenpen", "robt")
        ),
        "criterion": (("fused_label_smoothed_cross_entropy",), "label_smoothed_cross_entropy", ("rdrop_alpha",)),
        "optimizer": (("fused_adam", "muon"), "adam", ("muon_momentum", "muon_ns_steps", "muon_scale")),
        "lr_scheduler": (
            ("inverse_sqrt_cooldown",), "inverse_sqrt", ("cooldown_updates", "lr_before_cooldown", "max_update")
        ),
    }  # fmt: skip
    for part, (ours, stock, own) in names.items():
        settings = config.get(part)
        if hasattr(settings, "get") and settings.get("_name") in ours:
            kept = {name: value for name, value in settings.items() if name not in own}
            config[part] = {**kept, "_name": stock}


def loaded_model(path: str, weights: dict[str, Any], flags: argparse.Namespace) -> Any:
    """Return the model with `weights` of any version, under their current names."""
    from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
    from fairseq_deep.runtime.model import StoredModel, build_model

    sizes = [len(weights[f"{side}.embed_tokens.weight"]) - len(SPECIAL) for side in ("encoder", "decoder")]
    try:
        return build_model(StoredModel(flags, weights, {}), *(Dictionary(map(str, range(size))) for size in sizes))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def own_flags() -> set[str]:
    """Return the names of the model flags that this package adds to fairseq's Transformer."""
    from fairseq.models.transformer import TransformerModel

    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

    return {*added(DeepTransformerModel.add_args, TransformerModel.add_args)}


def plain_weights(path: str, model: Any, stored: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Return the `stored` weights of a plain model, with factors and weights of streams folded in.

    Folded weights have at least fp32: the smallest factors times a weight are below the normal numbers of fp16. Of
    tables that folding has separated, `flags` no longer say that they are shared.
    """
    import torch

    from fairseq_deep.core.keep_fp32 import widened
    from fairseq_deep.runtime.plain import fold_all

    fold_all(path, model)
    own = {name: weight for name, weight in model.state_dict().items() if ".history." not in name}
    source, target, output = (own[f"{name}.weight"] for name in TABLES)
    tied = flags.share_all_embeddings or flags.share_decoder_input_output_embed
    flags.share_decoder_input_output_embed = tied and target.equal(output)
    flags.share_all_embeddings = flags.share_all_embeddings and source.equal(target) and target.equal(output)
    return {
        name: stored[name] if torch.equal(stored[name].to(weight.dtype), weight) else widened(weight)
        for name, weight in own.items()
    }
