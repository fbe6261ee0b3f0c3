"""From flags to aggregators: what encoder and decoder share when they are built and loaded."""

import inspect
from typing import Any, Dict

import torch
from torch import Tensor

from ..aggregators import AGGREGATORS, Aggregator
from ..registry import UsageError

SIDES = ("encoder", "decoder")


def aggregator_name(cfg, side: str, default: str = "residual") -> str:
    """The aggregator of *side* ("encoder" or "decoder"): its own flag, else ``--layer-agg``, else *default*."""
    return getattr(cfg, f"{side}_layer_agg", None) or getattr(cfg, "layer_agg", None) or default


def attention_only(cfg, side: str, default: str = "residual") -> bool:
    """Whether the layers of *side* are their attention alone, because its aggregator replaces the rest."""
    return AGGREGATORS.get(aggregator_name(cfg, side, default)).attention_only


def _prefix(name: str) -> str:
    return AGGREGATORS.get(name).flag_prefix or name


def aggregator_options(cfg, name: str) -> Dict[str, Any]:
    """The constructor arguments of the aggregator *name* that its flags have set."""
    known = list(inspect.signature(AGGREGATORS.get(name).__init__).parameters)[4:]  # after self and the stack's shape
    values = {option: getattr(cfg, f"{_prefix(name)}_{option}", None) for option in known}
    return {option: value for option, value in values.items() if value is not None}


def check_options(cfg) -> None:
    """Refuse what an aggregator cannot do, before fairseq builds anything.

    Raises:
        UsageError: an option of an aggregator that neither stack uses, so that it would silently do nothing, or a flag
            that means nothing, or cannot be, in a stack with its aggregator
    """
    sides = {side: aggregator_name(cfg, side) for side in SIDES}
    used = {_prefix(name) for name in sides.values()}
    for name in AGGREGATORS.names():
        options = {} if _prefix(name) in used else aggregator_options(cfg, name)
        given = [option.replace("_", "-") for option, value in options.items() if value is not False]
        if given:
            raise UsageError(
                f"--{_prefix(name)}-{given[0]} does nothing without --layer-agg {name}: "
                "add that, or leave the option out"
            )
    for option in AGGREGATORS.get(sides["encoder"]).decoder_options:
        flag = f"{_prefix(sides['encoder'])}_{option}"
        if _prefix(sides["decoder"]) != _prefix(sides["encoder"]) and getattr(cfg, flag, None):
            raise UsageError(
                f"--{flag.replace('_', '-')} is about the decoder, whose --layer-agg is {sides['decoder']}: "
                "leave it out"
            )
    for side, name in sides.items():
        flags = [f"{side}_layerdrop", f"{side}_layers_to_keep"] + (["base_layers"] if side == "decoder" else [])
        for flag in flags if AGGREGATORS.get(name).needs_every_layer else []:
            if getattr(cfg, flag, None):
                raise UsageError(
                    f"--layer-agg {name} needs each layer of the {side} at its place: "
                    f"leave out --{flag.replace('_', '-')}, or use --{side}-layer-agg residual"
                )
        if AGGREGATORS.get(name).attention_only:
            _check_attention_only(cfg, side, name)
        elif getattr(cfg, "relative_positions", None) is not None:
            raise UsageError(
                f"--relative-positions is not made for the {side}'s --layer-agg {name}: "
                "leave it out, or use --layer-agg lstm"
            )


def _check_attention_only(cfg, side: str, name: str) -> None:
    """Refuse what only the layers that the aggregator *name* replaces can do."""
    flags = ["quant_noise_pq", "quant_noise_scalar", f"{side}_xformers_att_config"]
    flags += ["cross_self_attention", "no_cross_attention", "no_decoder_final_norm"] if side == "decoder" else []
    for flag in flags:
        if getattr(cfg, flag, None):
            raise UsageError(
                f"--{flag.replace('_', '-')} is not made for the layers of --layer-agg {name}: "
                f"leave it out, or use --{side}-layer-agg residual"
            )
    relative = getattr(cfg, "relative_positions", None)
    if relative is not None and relative < 1:
        raise UsageError(f"--relative-positions {relative} leaves no distance: use 1 or more, or leave it out")


def drop_feed_forward(args, layer_agg: str) -> None:
    """Set what means nothing in a stack of attention layers to a value that says so, before presets fill *args*.

    It is called again on the flags of a checkpoint, and then finds its own values.

    Args:
        args: flags as the user gave them
        layer_agg: the aggregator if no flag names one

    Raises:
        UsageError: the user gave one of those flags
    """
    alone = [side for side in SIDES if attention_only(args, side, layer_agg)]
    for side in alone:
        name = aggregator_name(args, side, layer_agg)
        _settle(args, f"{side}_ffn_embed_dim", 0, f"{name} has no feed-forward sub-layer: use --lstm-hidden instead")
        _settle(args, f"{side}_normalize_before", False, f"{name} has its own norms: use --lstm-final-norm for more")
    if len(alone) == len(SIDES):
        name = aggregator_name(args, "encoder", layer_agg)
        _settle(args, "activation_fn", "gelu", f"{name} has its own: use --lstm-ffn and --lstm-glu")


def _settle(args, flag: str, value: Any, cure: str) -> None:
    if getattr(args, flag, None) not in (None, value):
        raise UsageError(f"--{flag.replace('_', '-')} does nothing: --layer-agg {cure}")
    setattr(args, flag, value)


def build_aggregator(cfg, side: str, num_layers: int, dim: int) -> Aggregator:
    """The aggregator of one stack.

    Args:
        cfg: fairseq's ``TransformerConfig`` with the flags of this package
        side: "encoder" or "decoder"
        num_layers: number of layers of the stack
        dim: its width

    Raises:
        UsageError: an option of the aggregator is wrong
    """
    name = aggregator_name(cfg, side)
    options = aggregator_options(cfg, name)
    if AGGREGATORS.get(name).attention_only:
        options.update(
            decoder=side == "decoder",
            dropout=cfg.dropout,
            activation_dropout=float(cfg.activation_dropout or cfg.relu_dropout or 0),
            recompute=cfg.checkpoint_activations,
        )
    return AGGREGATORS.get(name)(num_layers, dim, getattr(cfg, side).normalize_before, **options)


def keep_final_norm(state_dict: Dict[str, Tensor], name: str) -> None:
    """Stop fairseq from dropping the stack's final norm because of an old ``version`` number.

    fairseq takes an early version for a model without that norm; the original DLCL code wrote early versions and
    had it. Whether the checkpoint holds the norm is what decides.
    """
    if f"{name}.layer_norm.weight" in state_dict:
        state_dict[f"{name}.version"] = torch.tensor([3.0])
