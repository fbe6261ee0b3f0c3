"""Resolution of a recipe's options to a plan: directory, data, devices, batch size and training command."""

from __future__ import annotations

import argparse
import copy
import functools
import os

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import text_of
from fairseq_deep.tools.machine import count_cores

from . import changes, nodes, seeds
from .model import parse_command
from .options import EXAMPLES, ROOT, check_extra_flags, flag_of, load_conf, quote
from .other_runs import check_against, check_start, check_teacher, start_flags
from .recipe import Recipe, Shared
from .stages import compute_keys
from .text.corpus import check_folder


class Plan:
    """A recipe with resolved and checked options.

    Attributes:
        options: the recipe's options, without "auto"
        exp: directory of this training run
        home: directory of the experiment, which has several training runs if there are several seeds
        route: source of the text: "demo", "folder" or "download"
        processes, devices: number of training processes per machine, and on all machines
        product: tokens per update
        save_flags: flags of fairseq-train for ``--average-updates``
        keys: hash of all inputs of each stage
        train_command: words of the training command
        seed_list: seeds to train; empty for a single run
        place: this machine among several
        notes: problems that a dry run only reports
    """

    def __init__(self, options: Recipe) -> None:
        self.options, self.notes = options, []
        if options.demo and "conf" not in options.given:
            options.conf = "demo"
        load_conf(options, os.path.join(EXAMPLES, "common", "common.args"))
        load_conf(options, options.conf)
        words = [word for flag, value in options.conf_flags.items() for word in (flag, value) if word]
        self.conf_flags = changes.fit_schedule(words, options.extra)
        check_extra_flags(options)

    def resolve(self, resumes: bool = True) -> Plan:
        """Resolve and check all options, without reading the text.

        Args:
            resumes: whether the plan must agree with an existing run in its directory

        Raises:
            UsageError: options conflict, or the directory has another experiment
        """
        options = self.options
        if not options.arch:
            raise UsageError(f"--arch is missing, also in the conf files '{options.conf}': add it")
        if not options.stage <= options.stop_stage <= 7:
            raise UsageError(f"--stage {options.stage}, --stop-stage {options.stop_stage}: stages must be from 0 to 7")
        if options.workers == "auto":
            options.workers = count_cores()
        self._resolve_folder()
        self._resolve_route()
        self._check_embeddings()
        self.place = nodes.Place(options)
        self._resolve_devices()
        self._resolve_batch()
        self.save_flags = self._averaging_flags()
        self.train_command = self._train_command()
        self.seed_list = seeds.resolve(self)
        check_against(self)
        self.keys = compute_keys(self)
        check_start(self)
        self._check_numbers()
        for plan in ([self.of_seed(seed) for seed in self.seed_list] or [self]) if resumes else ():
            plan._check_changed()
        return self

    def of_seed(self, seed: int) -> Plan:
        """Return the plan of one of several seeds, with its own directory."""
        plan = copy.copy(self)
        plan.options = copy.copy(self.options)
        plan.options.seed, plan.exp = seed, os.path.join(self.home, f"seed{seed}")
        other = os.path.join(self.options.against, f"seed{seed}")
        if self.options.against and os.path.isdir(other):
            plan.options.against = other
        plan.train_command = plan._train_command()
        plan.keys = compute_keys(plan)
        return plan

    @property
    def langs(self) -> tuple[str, str]:
        """Source and target language."""
        return self.options.source_lang, self.options.target_lang

    @property
    def subsets(self) -> list[str]:
        """Names of the sets to translate and score."""
        return [] if self.options.subsets == "none" else self.options.subsets.split(",")

    @property
    def description(self) -> str:
        """The file that describes the corpus to download."""
        return os.path.join(EXAMPLES, self.options.task, f"{self.options.corpus}.json")

    @property
    def has_download(self) -> bool:
        """Whether there is a public corpus."""
        return self.options.multilingual or os.path.isfile(self.description)

    @property
    def again(self) -> str:
        """The command that resumes the run."""
        if self.options.task == "compare":
            return "run the same command again"
        rank = ["--node-rank", self.place.rank] if "node_rank" in self.options.given else []
        return quote([os.path.join(self.home, "resume.sh"), *rank])

    @functools.cached_property
    def args(self) -> argparse.Namespace:
        """The training command as fairseq-train parses it, with the architecture's values; common to all seeds.

        Raises:
            UsageError: a flag is unknown or wrong, or flags contradict each other
        """
        return parse_command(tuple(self.train_command), tuple(map(flag_of, self.options.declared())))

    def path(self, *parts: str) -> str:
        """Return a path in the directory of this training run."""
        return os.path.join(self.exp, *parts)

    def _resolve_folder(self) -> None:
        options = self.options
        name = f"{options.task}-{options.conf.replace(',', '-').replace('/', '-')}"
        if "arch" in options.given:
            name += f"-{options.arch.removeprefix('transformer_')}"
        exp = os.path.join(ROOT, "exp", "demo" if options.demo else name) if options.exp == "auto" else options.exp
        self.exp = self.home = options.exp = os.path.abspath(exp)
        if ":" in self.exp or "," in self.exp:  # fairseq splits paths at ':' and prefixes at ','
            raise UsageError(f"--exp {self.exp}: fairseq does not support ':' or ',' in a path; choose another one")
        if os.path.exists(self.exp) and not os.path.isdir(self.exp):
            raise UsageError(f"--exp {self.exp} must be a directory, not a file: choose another one")
        if any(os.path.exists(self.path(name)) for name in ("cmd.sh", "env.txt")):
            return
        for part in ("text", "data-bin", "checkpoints", "corpus"):
            if os.path.exists(self.path(part)):
                raise UsageError(
                    f"--exp {self.exp} has a {part} that was not written by a recipe and would be overwritten: "
                    "choose another directory"
                )

    def _resolve_route(self) -> None:
        options = self.options
        if options.data and options.demo:
            raise UsageError("--data and --demo exclude each other: give one")
        self.route = "folder" if options.data else "demo" if options.demo else "download"
        for name, useless, why in (
            ("temperature", not options.multilingual, "for one language pair"),
            ("max_words", options.bpe == "sentencepiece", "with --bpe sentencepiece: use --max-subwords"),
            *((name, self.route != "download", "without a download") for name in ("data_url", "checksums", "corpus")),
        ):
            if useless and name in options.given:
                self.notes.append(f"{flag_of(name)} has no effect {why}")
        if options.multilingual and options.subsets not in ("test", "none"):
            raise UsageError(f"--subsets {options.subsets}: this recipe scores only test; give --subsets test, or none")
        if options.max_words == "auto":
            options.max_words = options.download_max_words if self.route == "download" else 250
        if self.route == "folder":
            check_folder(self)
        if options.teacher:
            if options.multilingual:
                raise UsageError("--teacher requires text of one language pair, but this recipe has many: omit it")
            check_teacher(self)
        if self.route == "download" and not options.dry_run and not self.has_download:
            raise UsageError(
                f"{options.task} has no public archive ({self.description} does not exist): give your own text with "
                "--data DIR"
            )

    def _check_embeddings(self) -> None:
        options = self.options
        if options.bpe == "per-side" and options.embeddings != "target":
            raise UsageError(
                "--bpe per-side is not supported with --embeddings all, since each side has its own dictionary: "
                "add --embeddings target"
            )

    def _resolve_devices(self) -> None:
        options = self.options
        resolve_gpus(options)
        self.processes = options.ngpu or 1
        self.devices = self.place.nnodes * self.processes
        self.device_name = ("GPU" if options.ngpu else "CPU") + "s" * (self.devices > 1)
        if options.ngpu and options.decode_precision != "fp32":
            raise UsageError(
                f"--decode-precision {options.decode_precision} requires the CPU: omit it, or use --ngpu 0"
            )
        if not options.ngpu and options.stage <= 4 and options.precision == "fp16":
            raise UsageError("--precision fp16 requires a GPU, since fairseq has no fp16 training on the CPU: use fp32 "
                             "or bf16")  # fmt: skip

    def _resolve_batch(self) -> None:
        """Resolve the batch size; a product other than the published one requires ``--force-batch``."""
        options, step = self.options, self.devices * self.options.max_tokens
        if options.update_freq == "auto":
            options.update_freq = max(1, (options.batch_tokens + step // 2) // step)
        self.product = step * options.update_freq
        if self.product != options.batch_tokens and not options.force_batch and options.stage <= 4:
            raise UsageError(
                f"{self.batch_words()}, but this job is defined for {options.batch_tokens:,}: change --ngpu, "
                "--max-tokens or --update-freq, or accept it with --force-batch true"
            )

    def batch_words(self) -> str:
        """Describe the batch size."""
        tokens, frequency = self.options.max_tokens, self.options.update_freq
        return (
            f"{self.devices} {self.device_name} x {tokens:,} tokens x update-freq {frequency} = "
            f"{self.product:,} tokens per update"
        )

    def _averaging_flags(self) -> list[str]:
        """Return the flags that replace epoch checkpoints by checkpoints every ``--average-updates`` updates."""
        options, every = self.options, self.options.average_updates
        if not every:
            return []
        if options.average < 2:
            raise UsageError(
                f"--average-updates {every} has no effect with --average {options.average}: raise --average, or omit "
                "--average-updates"
            )
        clashes = ("--save-interval-updates", "--keep-interval-updates", "--keep-interval-updates-pattern", "--no-save")
        for word in (*self.conf_flags, *options.extra):
            if word.partition("=")[0] in clashes:
                raise UsageError(
                    f"{word.partition('=')[0]} conflicts with --average-updates {every}, which sets the checkpoints to "
                    "save: omit one of them"
                )
        flags = ["--save-interval-updates", every, "--keep-interval-updates", options.average]
        return [*map(str, flags), "--no-epoch-checkpoints"]

    def _train_command(self) -> list[str]:
        options = self.options
        device = ["--distributed-world-size", self.devices] if options.ngpu else ["--cpu"]
        if not options.ngpu and self.devices > 1:
            device += ["--distributed-backend", "gloo"]
        task = "deep_translation" if self.robt else "translation"
        words = [
            "fairseq-train", self.path("data-bin"), "--user-dir", os.path.join(ROOT, "fairseq_deep"),
            "--task", task, "--source-lang", options.source_lang, "--target-lang", options.target_lang,
            "--arch", options.arch, self.share_flag, *self.conf_flags, "--max-tokens", options.max_tokens,
            "--update-freq", options.update_freq, "--seed", options.seed, *device,
            *([] if options.precision == "fp32" else [f"--{options.precision}"]),
            "--save-dir", self.path("checkpoints"), "--log-format", "json", *self.save_flags,
            *start_flags(options.start_from), *options.extra,
        ]  # fmt: skip
        return [str(word) for word in words]

    @property
    def robt(self) -> bool:
        """Whether training uses random back-translation."""
        return "--robt" in (*self.conf_flags, *self.options.extra)

    @property
    def share_flag(self) -> str:
        """The flag for ``--embeddings``."""
        everything = self.options.embeddings == "all"
        return "--share-all-embeddings" if everything else "--share-decoder-input-output-embed"

    def _check_numbers(self) -> None:
        """Reject flags that fairseq-train would reject, and numbers that contradict each other."""
        last, every = self.args.max_update, self.options.average_updates  # 0: no limit
        if last and every > last:
            raise UsageError(f"--average-updates {every} must be at most {last}, the number of updates: lower it")
        if self.options.multilingual and not float(self.options.temperature):
            raise UsageError("--temperature must be more than 0: 1 does not repeat small pairs")

    def run_record(self) -> list[str]:
        """Return the settings, in addition to the command, that must not change when a run is resumed."""
        machines = f" on {self.place.nnodes} machines" if self.place.nnodes > 1 else ""
        batch = f"{self.devices} {self.options.max_tokens} {self.options.update_freq}"
        return [self.options.arch, batch, self.keys[3], f"{self.devices} {self.device_name}{machines}"]

    def _check_changed(self) -> None:
        """Reject a resumed run with other settings."""
        options, record = self.options, self.path("trained-with.txt")
        if options.stage > 4 or not (changes.can_resume(self.path("checkpoints")) and os.path.isfile(record)):
            return
        _, batch, text, *_ = [*text_of(record).splitlines(), "", "", ""]
        if text != self.keys[3]:
            raise UsageError(
                f"{self.exp} has a model trained on other data or other sub-words: use another --exp, "
                f"or delete {self.path('checkpoints')} to train from scratch"
            )
        changes.check(self.path("train.sh"), self.exp, self.train_command)
        if batch != self.run_record()[1] and not options.force_batch:
            devices, tokens, frequency = batch.split()
            raise UsageError(
                f"{self.exp} was trained with {devices} device(s) x {tokens} tokens x update-freq {frequency}, now it "
                f"would be {self.devices} x {options.max_tokens} x {options.update_freq}: use the same batch, use "
                "another --exp, or accept the change with --force-batch true"
            )


def resolve_gpus(options: Shared) -> None:
    """Divide the visible GPUs among simultaneous runs, unless ``--ngpu`` is given."""
    if options.ngpu == "auto":
        options.ngpu = count_gpus() // options.jobs or min(1, count_gpus())


def count_gpus() -> int:
    """Return the number of visible GPUs."""
    import torch

    return torch.cuda.device_count()
