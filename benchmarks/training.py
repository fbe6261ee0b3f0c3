"""Training: steps of fairseq's trainer with stock fairseq's transformer and with ours, flag by flag, on a CPU or a GPU.

Every system is a whole ``fairseq-train`` (model, criterion, optimizer, trainer) with the same data and seed, in a
process of its own. The systems take turns on the same batches, and their speed is the median over turns of the first
one's time by theirs. A system is "stock", "ours" or an architecture, then flags. stock and ours have the sizes that the
options say, an architecture has its own. Variables of the environment come first, as in a shell.

    python benchmarks/training.py [--data DIR] [--dim 256 --layers 6 --vocabulary 8000] [--tokens 4000] [--rounds 10]
    python benchmarks/training.py --systems stock "ours --compile" --profile
    python benchmarks/training.py --device cuda --flags="--fp16" \
        --systems transformer_prenorm_30l transformer_dlcl_30l "FAIRSEQ_DEEP_TRITON=0 transformer_dlcl_30l"

On a GPU, a profiled step also gives the kernels that it launches, and how long the GPU computes them.
"""

import argparse
import contextlib
import io
import os
import re
import resource
import shlex
import sys

import torch
from fairseq import metrics, options, tasks
from fairseq.data import Dictionary, LanguagePairDataset, ListDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from torch.profiler import ProfilerActivity
from turns import Turns, describe_machine, median, speed

from fairseq_deep.tools.tables import format_table

ADAM, LOSS = "--optimizer fused_adam", "--criterion fused_label_smoothed_cross_entropy"
SYSTEMS = ("stock", "ours", f"ours {ADAM}", f"ours {LOSS}", f"ours {ADAM} {LOSS}")


def read_system(system):
    """{variable of the environment: its value}, and the words of *system*."""
    words, variables = shlex.split(system), {}
    while re.match("[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


def command_line(system, args):
    """The flags of ``fairseq-train`` for *system*."""
    name, *flags = [*read_system(system)[1], *shlex.split(args.flags)]
    arch = {"stock": "transformer", "ours": f"transformer_{args.norm}norm_6l"}.get(name, name)
    line = [args.data or "none", "--arch", arch]
    for side in ("encoder", "decoder") if arch != name else ():
        line += [f"--{side}-layers", str(args.layers), f"--{side}-embed-dim", str(args.dim)]
        line += [f"--{side}-ffn-embed-dim", str(4 * args.dim), f"--{side}-attention-heads", str(max(1, args.dim // 64))]
        line += [f"--{side}-normalize-before"] if args.norm == "pre" else []
    for place in ("", "attention-", "activation-"):
        line += [f"--{place}dropout", str(args.inner_dropout if place else args.dropout)]
    if "--optimizer" not in flags:
        line += ["--optimizer", "adam"]
    if "--criterion" not in flags:
        line += ["--criterion", "label_smoothed_cross_entropy"]
    line += ["--label-smoothing", "0.1", "--share-all-embeddings", "--adam-betas", "(0.9, 0.98)", "--lr", "1e-4"]
    line += ["--max-tokens", str(args.tokens), "--clip-norm", str(args.clip_norm), "--seed", "1"]
    return [*line, *(["--cpu"] if args.device == "cpu" else []), *flags]


def made_up(args):
    """Pairs of random sentences of 4 to 60 words, in a task of their own; a hundred entries are language tags."""
    dictionary = Dictionary()
    for index in range(args.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"<2l{index}>" if index < 100 else str(index))
    generator = torch.Generator().manual_seed(1)
    lengths = (20 * torch.empty(20000).log_normal_(0, 0.6, generator=generator)).long().clamp(4, 60).tolist()
    sides = []
    for _ in range(2):
        words = [torch.randint(dictionary.nspecial, len(dictionary), (n,), generator=generator) for n in lengths]
        sides += [ListDataset([torch.cat([text, torch.tensor([dictionary.eos()])]) for text in words]), lengths]
    pairs = LanguagePairDataset(sides[0], sides[1], dictionary, sides[2], sides[3], dictionary, left_pad_target=False)
    return dictionary, pairs


class Training:
    """A worker: the trainer of one system, and batches of many lengths, the same for all systems."""

    def __init__(self, system, args):
        self.system, self.device = system, args.device
        os.environ.update(read_system(system)[0])
        with contextlib.redirect_stdout(io.StringIO()):
            parser = options.get_training_parser()
            words = command_line(system, args)
            cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))
            if args.data:
                task = tasks.setup_task(cfg.task)
                task.load_dataset("train")
            else:
                dictionary, pairs = made_up(args)
                task = TranslationTask(cfg.task, dictionary, dictionary)
                task.datasets["train"] = pairs
            torch.manual_seed(1)
            self.trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
            found = task.get_batch_iterator(task.dataset("train"), max_tokens=args.tokens, seed=1, num_workers=0)
            found = found.next_epoch_itr(shuffle=True)
            self.samples = [next(found) for _ in range(args.batches)]

    def words(self):
        """Target words of all batches."""
        return sum(sample["ntokens"] for sample in self.samples)

    def steps(self):
        """The loss after a step for each batch."""
        with metrics.aggregate(new_root=True):
            return [self.trainer.train_step([sample]) for sample in self.samples][-1]["loss"]

    def peak(self):
        """Most MiB of memory that the process, or its GPU, has used."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def profile(self):
        """Launches and milliseconds of the GPU per step, and the longest operations."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        with torch.profiler.profile(activities=activities) as record:
            self.steps()
        kernels = [event for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA
                   and not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
                   and not getattr(event, "is_user_annotation", False)]  # fmt: skip
        busy = sum(event.time_range.elapsed_us() for event in kernels) / 1000
        order = "self_cuda_time_total" if kernels else "self_cpu_time_total"
        table = record.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60)
        found = len(kernels) / len(self.samples), busy / len(self.samples)
        print("{}: {:.0f} launches and {:.2f} ms of the GPU a step".format(self.system, *found), file=sys.stderr)
        return *found, table


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {"dim": 256, "layers": 6, "vocabulary": 8000, "tokens": 4000, "batches": 4, "rounds": 7, "threads": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--data", metavar="DIR", help="of fairseq-preprocess; without it, random sentences")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--norm", choices=("pre", "post"), default="post")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--inner-dropout", type=float, default=0.0, help="on attention weights and in feed-forward")
    parser.add_argument("--clip-norm", type=float, default=0.0)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--flags", default="", help="flags of fairseq-train for all systems")
    parser.add_argument("--profile", action="store_true", help="say where the time goes, operation by operation")
    return parser.parse_args(words)


def report(turns, peaks, profiles, words, args):
    """The table: a row per system, compared with the first."""
    rows = [("system", "words a second", "CPU s a step", "speed", "by CPU s", "peak MiB", "loss", "launches", "GPU ms")]
    first = next(iter(turns.values()))
    for system, rounds in turns.items():
        shown = [words / median(rounds), median(rounds, 1) / args.batches, speed(first, rounds),
                 speed(first, rounds, 1), peaks[system], rounds[-1][2], *profiles.get(system, ())[:2]]  # fmt: skip
        rows.append((system, *(f"{value:.{digits}f}" for value, digits in zip(shown, (0, 3, 3, 3, 0, 3, 0, 2)))))
    columns = 9 if args.device == "cuda" else 7
    return format_table([row[:columns] for row in rows], right=range(1, columns))


def main(words=None):
    args = read_arguments(words)
    sizes = f"{args.norm}-norm, {args.layers} + {args.layers} layers, width {args.dim}"
    print(f"{describe_machine()}\nstock and ours: {sizes}; all: {args.vocabulary} words, {args.threads} thread(s), "
          f"{args.device}, dropout {args.dropout}, inside {args.inner_dropout} {args.flags}", flush=True)  # fmt: skip
    with Turns(Training, args.systems, args) as turns:
        count = next(iter(turns.ask("words").values()))[2]
        found = turns.measure("steps", args.rounds)
        peaks = {system: turn[2] for system, turn in turns.ask("peak").items()}
        profiled = turns.ask("profile") if args.profile or args.device == "cuda" else {}
        profiles = {system: turn[2] for system, turn in profiled.items()}
    found = {system: found[system] for system in peaks}
    print(f"{count / args.batches:.0f} target words a batch\n{report(found, peaks, profiles, count, args)}")
    for system, (*_, table) in profiles.items() if args.profile else ():
        print(f"\n{system}\n{table}")
    if turns.problems:
        raise SystemExit("\n".join(turns.problems))


if __name__ == "__main__":
    main()
