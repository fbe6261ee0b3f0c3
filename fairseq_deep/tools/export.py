"""write a checkpoint as one of fairseq's own model `transformer`

A model that differs from fairseq's only in its depth or in how its weights started is a `transformer` once it is
trained, and stock fairseq then needs no --user-dir for it. A structure that fairseq does not know is refused.
"""

import argparse
from typing import Any

from fairseq_deep.tools import (
    UserError,
    check_fairseq,
    check_output_path,
    load_checkpoint,
    model_flags,
    save_checkpoint,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the output."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of a plain model of this package")
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint under the name of fairseq's model, without the optimizer's state."""
    check_fairseq()
    check_output_path(args.output)
    state = load_checkpoint(args.checkpoint)
    flags = argparse.Namespace(**model_flags(state))
    flags.arch = getattr(flags, "arch", None) or getattr(flags, "_name", None)
    check_plain(args.checkpoint, flags)
    state["model"] = loaded_model(args.checkpoint, state["model"], flags).state_dict()
    for name in own_flags():
        vars(flags).pop(name, None)
    flags.arch, flags.user_dir = "transformer", None
    if state.get("cfg"):
        flags._name = "transformer"
        state["cfg"]["model"] = flags
        state["cfg"]["common"]["user_dir"] = None
    else:
        state["args"] = flags
    state.pop("last_optimizer_state", None)
    save_checkpoint(state, args.output)
    print(f"{args.checkpoint} -> {args.output}: a fairseq transformer")
    return 0


def loaded_model(path: str, weights: dict[str, Any], flags: argparse.Namespace) -> Any:
    """Return the model with `weights`: whatever version wrote them, it has today's names, and nothing is left over."""
    from fairseq.data import Dictionary

    from fairseq_deep.models.deep_transformer import DeepTransformerModel
    from fairseq_deep.registry import UsageError

    dictionaries = []
    for side in ("encoder", "decoder"):
        dictionary = Dictionary()
        for index in range(len(weights[f"{side}.embed_tokens.weight"]) - len(dictionary)):
            dictionary.add_symbol(str(index))
        dictionaries.append(dictionary)
    task = argparse.Namespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])
    flags = argparse.Namespace(**{**vars(flags), "encoder_embed_path": None, "decoder_embed_path": None})
    try:
        model = DeepTransformerModel.build_model(flags, task)
        model.to(weights["encoder.embed_tokens.weight"].dtype).load_state_dict(weights)
    except UsageError as error:
        raise UserError(f"{path}: {str(error).partition(': ')[2]}") from error
    return model


def own_flags() -> set[str]:
    """Return the names of the model flags that this package adds to those of fairseq's Transformer."""
    from fairseq.models.transformer import TransformerModel

    from fairseq_deep.models.deep_transformer import DeepTransformerModel

    names = []
    for model in (DeepTransformerModel, TransformerModel):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        model.add_args(parser)
        names.append({action.dest for action in parser._actions})
    return names[0] - names[1]


def check_plain(path: str, flags: argparse.Namespace) -> None:
    """Refuse what fairseq's `transformer` cannot express.

    Raises:
        UserError: it is no model of this package, or not a plain one
    """
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    from fairseq_deep.models.deep_transformer import DeepTransformerModel
    from fairseq_deep.models.description import describe

    found = ARCH_MODEL_REGISTRY.get(flags.arch)
    if found is None or not issubclass(found, DeepTransformerModel):
        raise UserError(f"{path} is a model {flags.arch}, not one of this package: it needs no export")
    ARCH_CONFIG_REGISTRY[flags.arch](flags)  # checkpoints of the original DLCL code say less
    for side, stack in describe(flags).items():
        init = stack.init.method
        other_layers = init.connects or not init.layer_norm
        found = {
            "--decoder-attn": stack.attention is not None and stack.attention.name != "self" and stack.attention.name,
            "--decoder-memory": stack.memory is not None and stack.memory.name != "last" and stack.memory.name,
            "--layer-agg": stack.aggregator.name != "residual" and stack.aggregator.name,
            "--residual": stack.residual.name != "plain" and stack.residual.name,
            "layers of --deep-init": other_layers and stack.init.name,
            "--relative-positions": stack.relative_positions,
        }
        for flag, value in found.items():
            if value:
                raise UserError(f"{path} has {flag} {value} ({side}), which fairseq's transformer has not")
