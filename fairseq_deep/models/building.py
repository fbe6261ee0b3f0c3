"""From flags to methods: what encoder and decoder share when they are built and loaded."""

import inspect
from typing import Any, Dict

import torch
from torch import Tensor

from ..aggregators import AGGREGATORS, Aggregator
from ..inits import INITS, Init
from ..layers import decoder_attention
from ..registry import Registry

SIDES = ("encoder", "decoder")
# arguments of methods that are no options: where they stand
_SHAPE = ("self", "num_layers", "dim", "pre_norm", "side", "encoder_layers", "decoder_layers", "decoder_sublayers")


def aggregator_name(cfg, side: str, default: str = "residual") -> str:
    """The aggregator of *side* ("encoder" or "decoder"): its own flag, else ``--layer-agg``, else *default*."""
    return getattr(cfg, f"{side}_layer_agg", None) or getattr(cfg, "layer_agg", None) or default


def init_name(cfg, side: str) -> str:
    """The initialisation of *side*: its own flag, else ``--deep-init``, else fairseq's own."""
    return getattr(cfg, f"{side}_deep_init", None) or getattr(cfg, "deep_init", None) or "fairseq"


def attention_only(cfg, side: str, default: str = "residual") -> bool:
    """Whether the layers of *side* are their attention alone, because its aggregator replaces the rest."""
    return AGGREGATORS.get(aggregator_name(cfg, side, default)).attention_only


def flag_prefix(registry: Registry, name: str) -> str:
    """What the flags of the method *name* begin with."""
    return registry.get(name).flag_prefix or name


def method_options(cfg, registry: Registry, name: str) -> Dict[str, Any]:
    """The constructor arguments of the method *name* that its flags have set."""
    known = [option for option in inspect.signature(registry.get(name).__init__).parameters if option not in _SHAPE]
    values = {option: getattr(cfg, f"{flag_prefix(registry, name)}_{option}", None) for option in known}
    return {option: value for option, value in values.items() if value is not None}


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
    options = method_options(cfg, AGGREGATORS, name)
    if AGGREGATORS.get(name).attention_only:
        options.update(
            decoder=side == "decoder",
            dropout=cfg.dropout,
            activation_dropout=float(cfg.activation_dropout or cfg.relu_dropout or 0),
            recompute=cfg.checkpoint_activations,
        )
    return AGGREGATORS.get(name)(num_layers, dim, getattr(cfg, side).normalize_before, **options)


def build_init(cfg, side: str) -> Init:
    """The initialisation of one stack.

    Raises:
        UsageError: an option of it is wrong
    """
    name = init_name(cfg, side)
    sublayers = 2 if cfg.no_cross_attention or decoder_attention(cfg).parallel else 3
    options = method_options(cfg, INITS, name)
    return INITS.get(name)(side, cfg.encoder.layers, cfg.decoder.layers, sublayers, **options)


def keep_final_norm(state_dict: Dict[str, Tensor], name: str) -> None:
    """Stop fairseq from dropping the stack's final norm because of an old ``version`` number.

    fairseq takes an early version for a model without that norm; the original DLCL code wrote early versions and
    had it. Whether the checkpoint holds the norm is what decides.
    """
    if f"{name}.layer_norm.weight" in state_dict:
        state_dict[f"{name}.version"] = torch.tensor([3.0])
