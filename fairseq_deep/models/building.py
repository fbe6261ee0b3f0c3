"""From flags to aggregators: what encoder and decoder share when they are built and loaded."""

import inspect
from typing import Any, Dict

import torch
from torch import Tensor

from ..aggregators import AGGREGATORS, Aggregator
from ..registry import UsageError


def aggregator_name(cfg, side: str) -> str:
    """The aggregator of *side* ("encoder" or "decoder"): its own flag, else ``--layer-agg``, else the plain stack."""
    return getattr(cfg, f"{side}_layer_agg", None) or getattr(cfg, "layer_agg", None) or "residual"


def aggregator_options(cfg, name: str) -> Dict[str, Any]:
    """The constructor arguments of the aggregator *name* that flags ``--NAME-OPTION`` have set."""
    known = list(inspect.signature(AGGREGATORS.get(name).__init__).parameters)[4:]  # after self and the stack's shape
    values = {option: getattr(cfg, f"{name}_{option}", None) for option in known}
    return {option: value for option, value in values.items() if value is not None}


def check_options(cfg) -> None:
    """Refuse what an aggregator cannot do, before fairseq builds anything.

    Raises:
        UsageError: an option of an aggregator that neither stack uses, so that it would silently do nothing, or a flag
            that drops or adds layers in a stack whose aggregator needs each at its place
    """
    sides = {side: aggregator_name(cfg, side) for side in ("encoder", "decoder")}
    for name in AGGREGATORS.names():
        options = {} if name in sides.values() else aggregator_options(cfg, name)
        given = [option.replace("_", "-") for option, value in options.items() if value is not False]
        if given:
            raise UsageError(
                f"--{name}-{given[0]} does nothing without --layer-agg {name}: add that, or leave the option out"
            )
    for side, name in sides.items():
        flags = [f"{side}_layerdrop", f"{side}_layers_to_keep"] + (["base_layers"] if side == "decoder" else [])
        for flag in flags if AGGREGATORS.get(name).needs_every_layer else []:
            if getattr(cfg, flag, None):
                raise UsageError(
                    f"--layer-agg {name} needs each layer of the {side} at its place: "
                    f"leave out --{flag.replace('_', '-')}, or use --{side}-layer-agg residual"
                )


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
    pre_norm = getattr(cfg, side).normalize_before
    return AGGREGATORS.get(name)(num_layers, dim, pre_norm, **aggregator_options(cfg, name))


def keep_final_norm(state_dict: Dict[str, Tensor], name: str) -> None:
    """Stop fairseq from dropping the stack's final norm because of an old ``version`` number.

    fairseq takes an early version for a model without that norm; the original DLCL code wrote early versions and
    had it. Whether the checkpoint holds the norm is what decides.
    """
    if f"{name}.layer_norm.weight" in state_dict:
        state_dict[f"{name}.version"] = torch.tensor([3.0])
