"""The driver of a recipe: reads options, prints the plan, and runs the stages.

    driver KIND SCRIPT check WORDS...    # rejects bad input, prints the plan; exit status 3: nothing to do
    driver KIND SCRIPT run WORDS...      # in the environment of the recipes

KIND is ``recipe/TASK`` (a directory under ``examples/`` with a file ``recipe.args``), ``compare`` or ``claims``. SCRIPT
is the script that the user called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import sys

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.machine import count_cores

from . import estimate, lock, model, nodes, record, scripts, seeds
from .options import EXAMPLES
from .plan import Plan
from .process import LOCKS, Plain, Stopped, Supervisor
from .recipe import Recipe
from .runner import Runner, StageFailed, of_system, report_result
from .steps import STAGES, set_up, start_training

DONE = 3
"""Exit status of ``check`` if there is nothing to do."""


def read_options(task: str, words: list[str]) -> Recipe:
    """Return the options of a recipe: its defaults, overridden by the user's options."""
    path, options = os.path.join(EXAMPLES, task, "recipe.args"), Recipe()
    if not os.path.isfile(path):
        raise UsageError(f"unknown recipe {task} ({path} does not exist); run this in a clone of the repository")
    with open(path, encoding="utf-8") as stream:
        options.parse(shlex.split(stream.read(), comments=True), by_user=False)
    options.set("task", task)
    return options.parse(words)


def main(arguments: list[str]) -> int:
    """Run the driver and return its exit status."""
    try:
        status = _main(*arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        print(f"error: {of_system(error)}", file=sys.stderr)
        return 2


def _main(kind: str, script: str, action: str, *words: str) -> int:
    if kind in ("compare", "claims"):
        return importlib.import_module(f"{__package__}.{kind}.driver").main(script, action, list(words))
    try:
        options = read_options(kind.removeprefix("recipe/"), list(words))
        plan = Plan(options)
        if options.help:
            options.parser(os.path.basename(script)).print_help()
            return DONE
        plan.resolve()
        return check(plan, script, list(words)) if action == "check" else run(plan, script, list(words))
    except StageFailed as end:
        print(end, file=sys.stderr)
        return end.status
    except Stopped:
        return 130
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


def check(plan: Plan, script: str, words: list[str]) -> int:
    """Print the plan and run the actions that do not require the environment."""
    options = plan.options
    if options.show_config:
        for name, value in dataclasses.asdict(options).items():
            print(f"{name:20} {json.dumps(value)}")
        return DONE
    exports = model.describe_exports(plan.train_command) if options.dry_run else ""  # otherwise stage 0 prints it
    for line in estimate.describe(plan):
        print(line, flush=True)
    if exports:
        print(exports, flush=True)
    if options.sbatch:
        if options.dry_run:
            print(f"would write {options.sbatch}")
        else:
            scripts.write_sbatch(plan, script, words)
        return DONE
    if options.dry_run:
        if plan.place.rank == 0:
            current = os.environ.get("FAIRSEQ_DEEP_ENV") == "current"
            print(f"ensure_env  # {'checks the active environment' if current else 'creates or updates .venv'}")
        run(plan, script, words)
        return DONE
    if plan.place.rank == 0:
        check_disk(plan)
    return 0


def check_disk(plan: Plan) -> None:
    """Reject an experiment without enough free disk space."""
    free, needed = estimate.free_gb(plan.exp), estimate.needed_gb(plan)
    if free + estimate.used_gb(plan.exp) < needed:
        raise UsageError(
            f"{plan.exp}: {free} GB free, about {needed} GB needed: choose a larger disk with --exp, or lower "
            "--disk-gb if less is enough"
        )


def run(plan: Plan, script: str, words: list[str]) -> int:
    """Run the stages of this machine."""
    options = plan.options
    supervisor = Supervisor([int(pid) for pid in os.environ.get("RECIPE_OWNER", "").split(",") if pid])
    if not options.dry_run:
        supervisor.install()
        if not options.ngpu:
            share_cores(plan.processes)
    if plan.place.rank:
        return join_training(plan, supervisor)
    runner = Runner(plan, supervisor)
    if not options.dry_run:
        prepare(runner, script, words)
    if plan.seed_list:
        runner.run_stages(STAGES, options.stage, min(options.stop_stage, 3))
        return run_seeds(runner) if options.stop_stage >= 4 else 0
    runner.run_stages(STAGES, options.stage, options.stop_stage)
    if options.stop_stage == 7 and not options.dry_run:
        record.print_table(plan.exp, plan.langs, report_result(runner))
    return 0


def share_cores(processes: int) -> None:
    """Divide the cores among *processes* and limit the spinning of their threads.

    The threads synchronise some thousand times per second. Without spinning, waking them takes up to half of the time;
    with long spinning, training is several times slower next to other work.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // processes)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def make_folder(plan: Plan, name: str) -> None:
    """Create the directory of the experiment, and lock its file *name*."""
    try:
        os.makedirs(plan.path("logs"), exist_ok=True)
        LOCKS.append(lock.take(plan.path(name), plan.exp))
    except OSError as error:
        raise UsageError(f"cannot write to {plan.exp} ({error.strerror}): choose another --exp") from error


def prepare(runner: Runner, script: str, words: list[str]) -> None:
    """Create and lock the directory, and write the scripts with the command and its resumption."""
    plan, options = runner.plan, runner.plan.options
    make_folder(plan, ".lock")
    if options.start_from:
        seeds.link_text(options.start_from, plan.exp)
    elif _changes_text(runner) and seeds.unlink_text(plan.exp):
        runner.markers.forget(1)  # the links were to the text of another run
    if plan.place.nnodes > 1:
        nodes.check_port(plan.place.port)
    runner.peers = plan.place.watch_peers(plan.path("logs"))
    if options.stage:
        runner.markers.forget(options.stage)
    scripts.write_commands(plan, script, words)


def _changes_text(runner: Runner) -> bool:
    """Return whether one of the stages that write the text is to run."""
    stage = runner.plan.options.stage
    return 0 < stage < 4 or not stage and not all(map(runner.markers.is_done, (1, 2, 3)))


def run_seeds(runner: Runner) -> int:
    """Train each seed; a failed seed does not stop the others, but invalid input and signals stop the run."""
    plan, options, good, failed = runner.plan, runner.plan.options, [], []
    for seed in plan.seed_list:
        print(f"seed {seed}", flush=True)
        try:
            _run_seed(Runner(plan.of_seed(seed), runner.supervisor))
            good.append(seed)
        except StageFailed as end:
            if end.status != 1:
                raise
            print(end, file=sys.stderr, flush=True)
            failed.append(seed)
    if options.stop_stage == 7 and not options.dry_run:
        with contextlib.suppress(FileNotFoundError):
            os.remove(plan.path("RESULT.json"))
        seeds.summarise(plan.exp, good, failed)
    return 1 if failed else 0


def _run_seed(runner: Runner) -> None:
    plan, options = runner.plan, runner.plan.options
    first = max(options.stage, 4)
    if not runner.dry:
        seeds.link_text(plan.home, plan.exp)
        if options.stage:
            runner.markers.forget(first)
    runner.run_stages(STAGES, first, options.stop_stage)
    if options.stop_stage == 7 and not runner.dry:
        found = report_result(runner)
        perplexities = f"  valid ppl   {found.get('valid_ppl', '-')} (best {found.get('best_valid_ppl', '-')})"
        said = f"BLEU = {found['bleu']:.2f}" if "bleu" in found else perplexities
        print(f"seed {options.seed}: {said}", flush=True)


def join_training(plan: Plan, supervisor: Supervisor) -> int:
    """Run the part of any machine except the first: train when the data are ready."""
    options, rank = plan.options, plan.place.rank
    if not options.stage <= 4 <= options.stop_stage:
        print("only the first machine runs these stages: nothing to do here")
        return 0
    runner = Runner(plan, supervisor)
    if runner.dry:
        STAGES[4](runner)
        return 0
    make_folder(plan, f"logs/node{rank}.lock")
    runner.peers = plan.place.watch_peers(plan.path("logs"))
    if not options.stage:
        print("stage 0 set-up", flush=True)
        runner.attempt(0, lambda each: set_up(each, f"logs/node{rank}.env.txt"), f"0-set-up.node{rank}.log")
    first = f"{plan.place.host}:{plan.place.port}"
    print(f"stage 4 train, after machine 0 ({first}) has prepared the data", flush=True)
    runner.attempt(4, _train_with_first, f"4-train.node{rank}.log")
    print("  done; machine 0 runs the remaining stages", flush=True)
    return 0


def _train_with_first(runner: Runner) -> None:
    plan, markers = runner.plan, runner.markers
    trained = None if plan.options.stage else (markers.path(4), plan.keys[4])
    nodes.wait(plan.place, plan.options.wait_hours, runner.peers, (markers.path(3), plan.keys[3]), trained)
    if trained and markers.is_done(4):
        print("  already done", flush=True)
        return
    runner.every = 600
    start_training(runner, Plain(runner.every))
