"""Decoding steps compiled by ``torch.compile`` without graph breaks, over caches of a fixed capacity.

With caches that grow, each step has different shapes. With a fixed capacity, in which a mask hides unused positions,
all steps have the same shapes and write to the caches in place. There are no graph breaks, no recompilation as
hypotheses grow, and no synchronisation during each step. A full cache doubles its capacity.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from fairseq_deep.core.registry import UsageError

logger = logging.getLogger(__name__)

SMALLEST = 64  # positions


class CompiledSteps:
    """Runs decoding steps, compiled except for the first of a search; if compilation fails, uncompiled with a warning.

    Args:
        run: ``run(decoder, incremental_state, ...)`` runs one decoding step
        capacity: number of positions; None starts at 64 and doubles it when needed
        options: options of ``torch.compile``

    Raises:
        UsageError: the capacity is below 1
    """

    def __init__(self, run: Callable, capacity: int | None = None, **options: Any):
        if capacity is not None and capacity < 1:
            raise UsageError(f"the capacity must be at least 1 position ({capacity}): change or omit it")
        self.run, self.capacity = run, capacity
        self.compiled = torch.compile(run, fullgraph=True, **options)

    def __call__(self, decoder, incremental_state, *inputs):
        """Run one step and return its outputs.

        Raises:
            UsageError: there are more positions than the capacity
        """
        if torch.is_grad_enabled() or not decoder.beam_state.has_started(incremental_state):
            return self.run(decoder, incremental_state, *inputs)
        self._make_room(decoder, incremental_state)
        try:
            return self.compiled(decoder, incremental_state, *inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # raised before the step ran
            lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
            logger.warning(f"decoding steps are not compiled: {lines[0] if lines else type(error).__name__}")
            self.compiled = self.run
        return self.run(decoder, incremental_state, *inputs)

    def _make_room(self, decoder, incremental_state) -> None:
        """Move all caches to a larger capacity if there is no room for one more position."""
        room, length = decoder.beam_state.go_on(incremental_state)
        if length <= room:
            return
        capacity = self.capacity or max(SMALLEST, 2 ** (length - 1).bit_length())
        if length > capacity:
            raise UsageError(
                f"a hypothesis has more than {capacity} positions: compile for a larger capacity, or omit it"
            )
        keys = decoder.beam_state.reserve(incremental_state, capacity)
        for module in decoder.modules():
            if hasattr(module, "reserve") and module is not decoder.beam_state:
                module.reserve(incremental_state, keys)
