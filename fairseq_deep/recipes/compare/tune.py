"""``compare --tune lr``: search for the learning rate of each system by validation loss, before the final runs.

Each system is trained with half, once and twice its learning rate, with a seed that the final runs do not use. If the
best rate is at an edge of the grid, the grid is extended on that side. The final runs use the best rate.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.changes import scaled
from fairseq_deep.recipes.record import result_line
from fairseq_deep.recipes.runner import StageFailed
from fairseq_deep.recipes.scripts import without_options
from fairseq_deep.tools.command_lines import flags_of

from .results import diverged
from .systems import System

STEP = 2.0
"""Ratio of two neighbouring rates."""
EXTENSIONS = 3
"""Maximum number of rates in addition to the first three of a system."""


SEARCH_FAILED = 4
"""Exit status if runs failed for a reason other than their learning rate; there is no table."""


class Tuner:
    """Chooses the learning rates of a comparison.

    Args:
        args: resolved options of the comparison
        plan: creates the runs of systems: ``plan(args, systems)``
        default: learning rate of a system without its own rate
    """

    def __init__(self, args: Any, plan: Any, default: float):
        self.plan, self.default = plan, default
        self.args = copy.copy(args)
        self.args.exp, self.args.seed_list = os.path.join(args.exp, "tune"), [args.tune_seed]
        self.args.seeds = f"{args.tune_seed},"
        self.args.updates, self.args.schedule, self.args.translate = args.tune_updates, args.tune_schedule, False

    def choose(self, systems: list[System], train: Any = None) -> list[System]:
        """Return *systems* with their best rates; their ``tuned`` is the loss by rate.

        Args:
            train: trains runs and returns those that failed; None to use only existing runs

        Raises:
            UsageError: all rates of a system diverge
        """
        losses: dict[str, dict[float, float]] = {system.label: {} for system in systems}
        todo = [(system, rate) for system in systems for rate in self.first_rates(system)]
        while todo:
            for (system, rate), loss in zip(todo, self.measure([self.candidate(*each) for each in todo], train)):
                losses[system.label][rate] = loss
            todo = [(system, rate) for system in systems for rate in following(losses[system.label])]
        return [self.chosen(system, losses[system.label]) for system in systems]

    def first_rates(self, system: System) -> list[float]:
        """Return half, once and twice the system's rate."""
        flags = flags_of(system.flags)
        middle = rate_of(flags, f"{system.label}: --lr") if "--lr" in flags else self.default
        return [middle / STEP, middle, middle * STEP]

    def candidate(self, system: System, rate: float) -> System:
        """Return the system with another rate, under its own label, and with its own schedule scaled to the search."""
        flags = [*system.flags, *scaled(system.flags, self.args.scales[1])]
        return replace(system, label=f"{system.label}-lr{rate:g}", flags=with_rate(flags, rate))

    def measure(self, candidates: list[System], train: Any) -> list[float]:
        """Train the candidates; return their validation losses, infinite for a run that diverged.

        Raises:
            StageFailed: runs failed for another reason
        """
        runs = self.plan(self.args, candidates)
        if train:
            failed = [run.name for run in train(runs) if not diverged(run.reason())]
            if failed:
                raise StageFailed(
                    f"{len(failed)} of {len(runs)} runs of the search for learning rates failed: "
                    f"{', '.join(failed)}; the same command retries them",
                    SEARCH_FAILED,
                )
        if not all(run.is_done() or run.reason() for run in runs):
            raise UsageError(f"{self.args.exp}: the search for learning rates is incomplete: omit --table-only")
        losses = [result_line(run.folder).get("valid_loss", math.nan) if run.is_done() else math.nan for run in runs]
        return [math.inf if math.isnan(loss) else loss for loss in losses]

    def chosen(self, system: System, losses: dict[float, float]) -> System:
        """Return the system with the rate of the lowest loss."""
        best = min(losses, key=lambda rate: losses[rate])
        if losses[best] == math.inf:
            rates = ", ".join(f"{rate:g}" for rate in sorted(losses))
            raise UsageError(f"{system.label} diverges with all learning rates ({rates}): give it another --lr")
        return replace(system, flags=with_rate(system.flags, best), tuned=dict(sorted(losses.items())))


def rate_of(flags: dict[str, str], place: str) -> float:
    """Return the value of ``--lr`` in *flags*, which were given at *place*.

    Raises:
        UsageError: it is not a positive number, such as a list of rates by epoch
    """
    try:
        rate = float(flags["--lr"])
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UsageError(f"{place} {flags['--lr']}: --tune lr searches a single rate; give one positive number")
    return rate


def with_rate(flags: list[str], rate: float) -> list[str]:
    """Return *flags* with the learning rate replaced by *rate*."""
    kept, _ = without_options(flags, "lr")
    return [*kept, "--lr", f"{rate:g}"]


def beyond(losses: dict[float, float]) -> float | None:
    """Return the next rate beyond the best one if it is at an edge of the grid; the lower one if all diverge."""
    best = min(losses, key=lambda rate: losses[rate])
    if losses[best] == math.inf or best == min(losses):
        return min(losses) / STEP
    return best * STEP if best == max(losses) else None


def following(losses: dict[float, float]) -> list[float]:
    """Return the rate to try next, if any."""
    further, diverging = beyond(losses), min(losses.values()) == math.inf
    return [] if further is None or len(losses) >= (4 if diverging else 3 + EXTENSIONS) else [further]


def describe(system: System) -> str:
    """Format the chosen rate of a system, and all rates with their losses."""
    return f"{system.label}: learning rate {flags_of(system.flags)['--lr']} of {format_rates(system.tuned)}"


def inside(losses: dict[float, float]) -> bool:
    """Return whether the best rate of a search has tried rates on both sides."""
    return bool(losses) and beyond(losses) is None


def format_rates(losses: dict[float, float]) -> str:
    """Format rates with their losses, with a remark if the best rate is at an edge of the grid after all extensions."""
    tried = ", ".join(f"{rate:g} ({loss:.3f})" for rate, loss in losses.items())
    best, further = min(losses, key=lambda rate: losses[rate]), beyond(losses)
    if further is None:
        return tried
    return f"{tried}; {best:g} is at the edge of the grid: start a new search from --lr {further:g}"
