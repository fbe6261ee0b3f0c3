"""Flags of fairseq that have no effect with a method: rejected if the user sets them, else set to a no-op value."""

from typing import Any

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.description import SIDES, method_name
from fairseq_deep.core.registry import UsageError


def settle_unused_flags(args: Any, layer_agg: str) -> None:
    """Set the flags that have no effect with an aggregator (``unused_flags``), before presets fill *args*.

    It accepts the no-op values that it set, since it runs again on the flags of a checkpoint.

    Args:
        args: flags as the user gave them
        layer_agg: the default aggregator

    Raises:
        UsageError: the user gave a flag without effect
    """
    chosen = {side: method_name(args, side, "layer_agg", layer_agg) for side in SIDES}
    for side, name in chosen.items():
        for flag, (value, cure) in AGGREGATORS.get(name).unused_flags.items():
            of_both = "{side}" not in flag
            if of_both and any(flag not in AGGREGATORS.get(other).unused_flags for other in chosen.values()):
                continue
            flag = flag.format(side=side)
            if getattr(args, flag, None) not in (None, value):
                raise UsageError(f"--{flag.replace('_', '-')} has no effect: --layer-agg {name} {cure}")
            setattr(args, flag, value)
