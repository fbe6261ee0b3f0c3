"""The options of a comparison: options of a recipe, which all systems share, and lists."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes import seeds
from fairseq_deep.recipes.changes import LENGTHS, scaled
from fairseq_deep.recipes.options import (
    AUTO,
    AUTO_COUNT,
    FILE,
    FOLDER,
    NUMBER,
    ROOT,
    SWITCH,
    TEXT,
    WHOLE,
    flag_of,
    load_conf,
    one_of,
    option,
)
from fairseq_deep.recipes.plan import Plan, resolve_gpus
from fairseq_deep.recipes.recipe import Recipe, Shared
from fairseq_deep.tools.command_lines import flags_of

from . import depth

SIZE = "; auto: as in the size"


@dataclass
class Compare(Shared):
    """The options of a comparison.

    Attributes, set by `resolve` and `resolve_schedule`:
        seed_list, depth_list: numbers of ``--seeds`` and ``--depths``
        scales: factors of the lengths of the schedule, of the runs and of the search
        schedule, tune_schedule: flags with the scaled lengths, of the runs and of the search
        warmup: warm-up of the size
    """

    argument_name, argument_help = "SYSTEM", "NAME, 'NAME FLAGS' or 'LABEL=NAME FLAGS'"

    conf: str = option("mini", one_of("mini", "base"), "size: mini (width 128, a CPU) or base (width 512, a GPU)")
    dry_run: bool = option(False, SWITCH, "check all options, print the plan and change nothing")
    exp: str = option("auto", FOLDER, "directory of the experiment; auto: exp/compare-CONF in the repository")
    source_lang: str = option("en", TEXT, "source language")
    target_lang: str = option("de", TEXT, "target language")
    ngpu: int | str = option("auto", AUTO, "GPUs per training run; 0: the CPU; auto: all visible GPUs, divided by "
                             "--jobs")  # fmt: skip
    seeds: str = option("1", TEXT, "random seeds of all systems: a number such as 3 (seeds 1, 2 and 3), or a list such "
                        "as 4,7")  # fmt: skip
    table_only: bool = option(False, SWITCH, "write table and picture of existing results without training")
    systems: str = option("", FILE, "file with one system per line, in addition to the command line")
    updates: int | str = option("auto", AUTO, f"updates of all training runs{SIZE}")
    depths: str = option("", TEXT, "encoder layers of all systems, such as 6,12,24; tests whether depth pays")
    tune: str = option("none", one_of("none", "lr"), "lr: search the learning rate of each system first")
    tune_updates: int | str = option("auto", AUTO_COUNT, "updates of the search; auto: as --updates")
    tune_seed: int = option(1000, WHOLE, "seed of the search; the final runs must not use it")
    tables: str = option(
        "", FOLDER, "directory for table and picture; none: the experiment's, and the table is printed"
    )
    width: int | str = option("auto", AUTO, f"width of all systems, with 4 x width in feed-forward layers{SIZE}; 0: "
                              "the architecture's")  # fmt: skip
    heads: int | str = option("auto", AUTO, f"number of attention heads{SIZE}, or width / 32 with --width")
    translate: bool = option(True, SWITCH, "translate and score the test set; false: compare losses only")
    halves: bool = option(False, SWITCH, "report BLEU on one half of the test set; the other half is for choosing")
    margin: str = option("0.5", NUMBER, "systems whose BLEU differs by less are equal")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed_list: list[int] = []
        self.depth_list: list[int] = []
        self.warmup = ""
        self.scales: list[float] = [1, 1]
        self.schedule: list[str] = []
        self.tune_schedule: list[str] = []

    def run(self, arch: str, folder: str, flags: list[str], **settings: Any) -> Recipe:
        """Return the options of the training runs of a system.

        Args:
            arch: architecture of the system
            folder: directory of its seeds
            flags: flags of fairseq-train
            settings: other options
        """
        names = Shared.declared()
        options = Recipe(**{name: getattr(self, name) for name in names})
        options.given = self.given & names.keys() | {"arch", "conf", "exp", "ngpu"}
        options.extra = list(flags)
        own = {"task": "compare", "arch": arch, "exp": folder, "dry_run": False,
                "nnodes": 1, "subsets": "test" if self.translate else "none"}  # fmt: skip
        for name, value in {**own, **settings}.items():
            setattr(options, name, value)
        return options


SIZES = {"mini": (128, 4, 2000, 1), "base": (512, 8, 15000, 3)}  # width, heads, updates, epochs to average
SCALES = "the scales of warm-up and search"
CONDITIONS = ("conf", "source_lang", "target_lang", "average", "updates", "width", "heads")
"""Options that are always recorded; the others if they are given."""
FREE = ("data", "depths", "disk_gb", "dry_run", "exp", "force_batch", "halves", "jobs",
        "launcher", "margin", "ngpu", "seeds", "slurm", "slurm_hours", "systems", "table_only", "tables", "translate",
        "workers")  # fmt: skip
"""Options that may change within an experiment."""


def check_options(options: Compare) -> None:
    """Reject invalid options, and options without effect, that can be detected without packages."""
    if options.width == 0 and "heads" in options.given:
        raise UsageError("--heads has no effect with --width 0: omit it, or give a width")
    for name in ("tune_updates", "tune_seed"):
        if name in options.given and options.tune == "none":
            raise UsageError(f"{flag_of(name)} has no effect without --tune lr: add that, or omit {flag_of(name)}")
    for name in ("halves", "margin"):
        if name in options.given and not options.translate:
            raise UsageError(f"{flag_of(name)} has no effect with --translate false: omit one of them")
    seeds.check_launcher(options)
    if not (options.data or options.demo):
        langs = f"{options.source_lang},{options.target_lang}"
        raise UsageError(f"--data is missing: give a directory with {{train,valid,test}}.{{{langs}}}, plain or .gz (or "
                         "--demo)")  # fmt: skip


def load_size(options: Compare) -> None:
    """Set the options of the size, for ``--help`` and for all runs."""
    load_conf(options, options.conf)
    if "average" not in options.given:
        options.average = SIZES[options.conf][3]


def resolve(options: Compare) -> None:
    """Resolve "auto" and check the numbers."""
    load_size(options)
    if options.exp == "auto":
        options.exp = os.path.join(ROOT, "exp", f"compare-{options.conf}")
    options.exp = os.path.abspath(options.exp)
    width, heads, updates, _ = SIZES[options.conf]
    options.updates = updates if options.updates == "auto" else options.updates
    if options.updates < 1:
        raise UsageError("--updates must be at least 1")
    if options.width != "auto":
        width, heads = options.width, max(1, options.width // 32)
    options.width, options.heads = width, heads if options.heads == "auto" else options.heads
    if width and (options.heads < 1 or width % options.heads):
        raise UsageError(f"--width {width} is not divisible by {options.heads} heads: change --width or --heads")
    options.seed_list = seeds.parse(options.seeds)
    options.depth_list = depth.parse(options.depths) if options.depths else []
    if options.tune_updates == "auto":
        options.tune_updates = options.updates  # half a run can favour another rate
    if options.tune != "none" and options.tune_seed in options.seed_list:
        raise UsageError(f"--tune-seed {options.tune_seed} must not be in --seeds: change one of them")
    resolve_gpus(options)
    if not options.ngpu:
        recipes.share_cores(options.jobs)


def resolve_schedule(args: Compare, old: dict[str, Any]) -> None:
    """Scale the warm-up to fewer updates than the size's, and the search's schedule to the search.

    Args:
        old: conditions of the existing directory; its scales remain if more updates are asked for
    """
    whole = SIZES[args.conf][2]
    if "--warmup-updates" in flags_of(args.extra):
        whole = args.updates
    scales = [min(1, args.updates / whole), min(1, args.tune_updates / args.updates)]
    args.scales = old.get(SCALES, [1, 1]) if old else scales
    words = [*Plan(args.run("", args.exp, [])).conf_flags, *args.extra]
    args.schedule = scaled(words, args.scales[0], LENGTHS[:1])
    args.warmup = flags_of(words)[LENGTHS[0]]
    args.tune_schedule = scaled([*words, *args.schedule], args.scales[1]) or args.schedule


def conditions(args: Compare) -> dict[str, Any]:
    """Return the options that all systems of one directory share."""
    names = [*CONDITIONS, *(name for name in args.declared() if name in args.given and name not in FREE)]
    if args.tune != "none":
        names += ["tune", "tune_updates", "tune_seed"]
    known = {flag_of(name): getattr(args, name) for name in dict.fromkeys(names)}
    if args.scales != [1, 1]:
        known[SCALES] = args.scales
    return {**known, "the flags after the lone --": shlex.join(args.extra)}  # a key of conditions.json
