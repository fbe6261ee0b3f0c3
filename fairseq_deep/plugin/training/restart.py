"""``--stack-restart-updates N``: a new run counts its updates from N, so its schedule begins there.

Shallow-to-Deep Training for Neural Machine Translation, Li et al., EMNLP 2020: after each stacking, the released code
resets the optimizer and sets the update number to min(previous number, warm-up). The learning rate then begins at its
peak. ``--max-update`` and checkpoint names use the same update number.
"""

import functools
import logging
from typing import Any

from fairseq.trainer import Trainer

logger = logging.getLogger(__name__)

_stock = Trainer.__dict__["load_checkpoint"]


@functools.wraps(_stock)
def load_checkpoint(trainer: Trainer, *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Load a checkpoint; without one, the run is new and its update number starts at the flag's value."""
    state = _stock(trainer, *arguments, **options)
    start = getattr(trainer.cfg.model, "stack_restart_updates", None)
    if state is None and start and not trainer.get_num_updates():
        trainer.set_num_updates(start)
        logger.info(f"--stack-restart-updates: training starts at update {start}, lr {trainer.get_lr():g}")
    return state
