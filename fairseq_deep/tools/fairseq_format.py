"""Export of a plain model to a checkpoint of fairseq's `transformer`."""

import argparse
import os
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.alternatives import naming_others
from fairseq_deep.tools.checkpoints import check_fairseq, load_checkpoint, model_flags, save_checkpoint
from fairseq_deep.tools.flags import added
from fairseq_deep.tools.output_files import check_outputs

TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
"""Modules that fairseq's flags can tie."""


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
