"""Export of a plain model to a checkpoint of fairseq's `transformer`."""

import argparse
import dataclasses
from typing import Any

import torch

from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime import build_model, find_bundle, search_of
from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
from fairseq_deep.runtime.loading import read_model
from fairseq_deep.runtime.plain import check_layers, check_weights, fold_all
from fairseq_deep.tools.checkpoints import check_fairseq, save_checkpoint
from fairseq_deep.tools.flags import added
from fairseq_deep.tools.output_files import check_outputs

TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
"""Modules that fairseq's flags can tie."""


def write_fairseq(args: argparse.Namespace) -> int:
    """Write the checkpoint as fairseq's `transformer`, without training state, like that of an imported model."""
    check_fairseq()
    from fairseq_deep.plugin.models.dictionaries import KEY
    from fairseq_deep.plugin.stored import make_state

    check_outputs([args.output], [args.checkpoint])
    bundle = find_bundle(args.checkpoint)
    path, stored = bundle.checkpoint, read_model(bundle)
    if stored.stock_arch:
        raise UsageError(f"{path} is already a model of fairseq ({stored.stock_arch}): use it without an export")
    check_layers(path, stored.flags, "fairseq")
    weights = dict(stored.tensors)
    try:
        sizes = [len(weights[f"{side}.embed_tokens.weight"]) - len(SPECIAL) for side in ("encoder", "decoder")]
        dictionaries = [Dictionary(map(str, range(size))) for size in sizes]  # their entries play no part
        model = build_model(dataclasses.replace(stored, tensors=weights), *dictionaries)
    except (KeyError, UsageError) as error:
        raise UsageError(f"{path} does not fit its settings: {one_line(error)}") from error
    check_weights(path, model, "fairseq")
    stored.tensors = plain_weights(path, model, weights, stored.flags)
    for name in ("max_source_positions", "max_target_positions"):  # fairseq-train gives them to the task only
        vars(stored.flags).setdefault(name, stored.task[name])
    state = make_state(stored, dictionaries, bundle.data, {"task": stored.task, "search": search_of(bundle)})
    state["task_state"] = {KEY: stored.hashes}
    flags, task = state["cfg"]["model"], state["cfg"]["task"]
    for name in own_flags():
        vars(flags).pop(name, None)
    flags.arch, flags._name, flags.user_dir = "transformer", "transformer", None
    task["_name"] = "translation"
    del task["gnmt_lenpen"]
    save_checkpoint(state, args.output)
    print(f"{path} -> {args.output}: a fairseq transformer")
    return 0


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
