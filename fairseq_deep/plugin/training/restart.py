"""Loading a run's checkpoint: ``--stack-restart-updates N``, and an error for another model's optimizer state.

With the flag, a new run counts its updates from N, so its schedule begins there.

Shallow-to-Deep Training for Neural Machine Translation, Li et al., EMNLP 2020: after each stacking, the released code
resets the optimizer and sets the update number to min(previous number, warm-up). The learning rate then begins at its
peak. ``--max-update`` and checkpoint names use the same update number.
"""

import functools
import logging
from typing import Any

from fairseq.trainer import Trainer

from fairseq_deep.core.registry import UsageError

logger = logging.getLogger(__name__)

_stock = Trainer.__dict__["load_checkpoint"]


@functools.wraps(_stock)
def load_checkpoint(trainer: Trainer, *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Load a checkpoint; without one, the run is new and its update number starts at the flag's value.

    Raises:
        UsageError: the optimizer state is another model's, such as a stock model's for its twin, or the schedule ends
            before the start
    """
    try:
        state = _stock(trainer, *arguments, **options)
    except ValueError as error:
        if "parameter group" not in str(error):
            raise
        raise UsageError(
            "the checkpoint's optimizer state has another number of parameters than the model: add --reset-optimizer, "
            "or resume with the checkpoint's --arch"
        ) from error
    start = getattr(trainer.cfg.model, "stack_restart_updates", None)
    if state is None and start and not trainer.get_num_updates():
        trainer.set_num_updates(start)
        if trainer.get_lr() == 0:
            raise UsageError(f"--stack-restart-updates {start}: the schedule's learning rate is 0 there; lower it")
        logger.info(f"--stack-restart-updates: training starts at update {start}, lr {trainer.get_lr():g}")
    return state
