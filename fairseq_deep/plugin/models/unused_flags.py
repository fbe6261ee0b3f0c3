"""Flags of fairseq that have no effect with a method: rejected if the user sets them, else set to a no-op value."""

from typing import Any

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.checks import unused_flags
from fairseq_deep.core.description import SIDES, method_name
from fairseq_deep.core.stack import MethodConfig


def settle_unused_flags(args: Any, layer_agg: str) -> None:
    """Set the flags that have no effect with an aggregator (``unused_flags``), before presets fill *args*.

    Args:
        args: flags as the user gave them
        layer_agg: the default aggregator

    Raises:
        UsageError: the user gave a flag without effect
    """
    names = {side: method_name(args, side, "layer_agg", layer_agg) for side in SIDES}
    chosen = {side: MethodConfig(name, AGGREGATORS.get(name)) for side, name in names.items()}
    for flag, value in unused_flags(args, chosen).items():
        setattr(args, flag, value)
