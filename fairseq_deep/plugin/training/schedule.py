"""``--lr-scheduler inverse_sqrt_cooldown``: warm-up, then 1/sqrt(t) or a constant rate, then linearly to zero.

fairseq's ``inverse_sqrt`` (Attention Is All You Need, Vaswani et al., 2017) never reaches zero. With a constant rate
before the cooldown this is the trapezoid of Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations
(Haegele et al., 2024), also called WSD. After t updates the rate is

    r(t) = r_0 + (r - r_0) t / W        t < W                  r: --lr, r_0: --warmup-init-lr, W: --warmup-updates
    r(t) = r sqrt(W / t), or r          W <= t <= T - C        T: --max-update, C: --cooldown-updates
    r(t) = r(T - C) (T - t) / C         T - C < t <= T

The rate depends on t only, so a resumed run has the same rates as an uninterrupted one.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from fairseq.optim.lr_scheduler.inverse_square_root_schedule import InverseSquareRootLRScheduleConfig
from omegaconf import II

from fairseq_deep.core.registry import UsageError

logger = logging.getLogger(__name__)

NAME = "inverse_sqrt_cooldown"
SHARE = 0.2
"""Default length of the cooldown, as a share of all updates."""
BEFORE = ("inverse_sqrt", "constant")


@dataclass
class CooldownConfig(InverseSquareRootLRScheduleConfig):
    """Flags of fairseq's ``inverse_sqrt`` and of the cooldown."""

    cooldown_updates: Optional[int] = field(  # noqa: UP045 (fairseq reads the type)
        default=None,
        metadata={"help": "updates of the linear decay to zero at --max-update (default: 20 %% of --max-update)"},
    )
    lr_before_cooldown: ChoiceEnum(BEFORE) = field(
        default="inverse_sqrt", metadata={"help": "learning rate between warm-up and cooldown"}
    )
    max_update: int = II("optimization.max_update")


def cooldown_of(flags: Any) -> int:
    """Return the number of updates in the cooldown.

    Raises:
        UsageError: warm-up and cooldown do not fit into ``--max-update``
    """
    total, warmup, length = flags.max_update, flags.warmup_updates, flags.cooldown_updates
    constant = str(flags.lr_before_cooldown) == "constant"
    if not total or total < 0:
        raise UsageError(f"--lr-scheduler {NAME} requires --max-update: the rate is zero there")
    length = max(round(SHARE * total), 1) if length is None else length
    if length < 1:
        raise UsageError(f"--cooldown-updates must be at least 1, not {length}: without a cooldown use inverse_sqrt")
    if warmup < (0 if constant else 1):
        raise UsageError(f"--warmup-updates {warmup} must be at least {0 if constant else 1}")
    if warmup + length > total:
        raise UsageError(f"--warmup-updates {warmup} and --cooldown-updates {length} are more than --max-update "
                         f"{total}: lower one of them")  # fmt: skip
    return length


def check_schedule(flags: Any) -> None:
    """Reject a schedule that does not fit into ``--max-update``, before data are read.

    Raises:
        UsageError: the schedule does not fit; the message names the flags
    """
    if getattr(flags, "lr_scheduler", None) == NAME:
        cooldown_of(flags)


@register_lr_scheduler(NAME, dataclass=CooldownConfig)
class InverseSqrtCooldown(FairseqLRScheduler):
    """The schedule; its state is its end, used to warn about a changed ``--max-update``.

    Raises:
        UsageError: warm-up and cooldown do not fit into ``--max-update``
    """

    def __init__(self, cfg: CooldownConfig, optimizer):
        super().__init__(cfg, optimizer)
        rates = cfg.lr if isinstance(cfg.lr, Collection) else [cfg.lr]
        if len(rates) > 1:
            raise UsageError(f"--lr with one rate per epoch is not supported with --lr-scheduler {NAME}: give one rate")
        self.peak, self.warmup, self.total = rates[0], cfg.warmup_updates, cfg.max_update
        self.cooldown = cooldown_of(cfg)
        self.constant = str(cfg.lr_before_cooldown) == "constant"
        self.first = cfg.warmup_init_lr if cfg.warmup_init_lr >= 0 else 0.0
        self.step_update(0)

    def rate(self, updates: int) -> float:
        """Return the learning rate of the update that follows *updates* updates."""
        if updates < self.warmup:
            return self.first + (self.peak - self.first) * updates / self.warmup
        start = self.total - self.cooldown
        rate = self.peak if self.constant else self.peak * (self.warmup / min(updates, start)) ** 0.5
        return rate if updates <= start else rate * max(self.total - updates, 0) / self.cooldown

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the next update; the contract is fairseq's."""
        self.optimizer.set_lr(self.rate(num_updates))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**super().state_dict(), "end": [self.total, self.cooldown]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint, which may come from another scheduler."""
        super().load_state_dict(state_dict)
        before, now = state_dict.get("end"), [self.total, self.cooldown]
        if before and before != now:
            logger.warning(f"the checkpoint's schedule had --max-update {before[0]} and --cooldown-updates {before[1]};"
                           f" from here on they are {now[0]} and {now[1]}")  # fmt: skip
