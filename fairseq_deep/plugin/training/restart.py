"""``--stack-restart-updates N``: a new training counts its updates from N, so that its schedule begins there.

Shallow-to-Deep Training for Neural Machine Translation, Li et al., EMNLP 2020: after each stacking the released code
resets the optimizer, and sets the count to min(count before, warm-up), so the learning rate begins at its peak.
``--max-update`` and the names of checkpoints have the same count.
"""

import functools
import logging
from typing import Any

from fairseq.trainer import Trainer

logger = logging.getLogger(__name__)

_stock = Trainer.__dict__["load_checkpoint"]


@functools.wraps(_stock)
def load_checkpoint(trainer: Trainer, *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Load a checkpoint; without one the training is new, and its count begins where the flag says."""
    state = _stock(trainer, *arguments, **options)
    start = getattr(trainer.cfg.model, "stack_restart_updates", None)
    if state is None and start and not trainer.get_num_updates():
        trainer.set_num_updates(start)
        logger.info(f"--stack-restart-updates: the count of updates begins at {start}, lr {trainer.get_lr():g}")
    return state
