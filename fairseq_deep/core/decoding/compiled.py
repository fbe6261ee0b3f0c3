"""Decoding steps that ``torch.compile`` takes whole, over caches of a fixed capacity.

With caches that grow, each step has other shapes. With room for a number of positions, of which a mask hides those that
are not in use, all steps have the same, and write in place where the caches are: no graph break, no recompilation as
hypotheses grow, and no question to the device within a step. Room is doubled where it is used up.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from fairseq_deep.core.registry import UsageError

logger = logging.getLogger(__name__)

SMALLEST = 64  # positions


class CompiledSteps:
    """Runs decoding steps, all but the first of a search compiled; where that fails, as they are, after a warning.

    Args:
        run: ``run(decoder, incremental_state, ...)``, a step
        capacity: room for so many positions; None doubles it from 64 on
        options: of ``torch.compile``

    Raises:
        UsageError: the capacity has no room
    """

    def __init__(self, run: Callable, capacity: int | None = None, **options: Any):
        if capacity is not None and capacity < 1:
            raise UsageError(f"a capacity of {capacity} positions has no room for any: give 1 or more, or none")
        self.run, self.capacity = run, capacity
        self.compiled = torch.compile(run, fullgraph=True, **options)

    def __call__(self, decoder, incremental_state, *inputs):
        """The outputs of a step.

        Raises:
            UsageError: more positions than the capacity
        """
        if torch.is_grad_enabled() or not decoder.beam_state.has_started(incremental_state):
            return self.run(decoder, incremental_state, *inputs)
        self._make_room(decoder, incremental_state)
        try:
            return self.compiled(decoder, incremental_state, *inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything ran
            lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
            logger.warning(f"decoding steps are not compiled: {lines[0] if lines else type(error).__name__}")
            self.compiled = self.run
        return self.run(decoder, incremental_state, *inputs)

    def _make_room(self, decoder, incremental_state) -> None:
        """Where there is none for one more position, move all caches into larger ones."""
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
