"""Training: steps of fairseq's trainer with stock fairseq's transformer and with ours, flag by flag.

Every system is a whole ``fairseq-train`` (model, criterion, optimizer, trainer) of the same shape, data and seed, in a
process of its own. The systems take turns on the same batches, and their speed is the median over turns of the first
one's time by theirs. Flags may follow "stock" and "ours": "ours --optimizer fused_adam".

    python benchmarks/training.py [--data DIR] [--dim 256 --layers 6 --vocabulary 8000] [--tokens 4000] [--rounds 10]
    python benchmarks/training.py --systems stock "ours --compile" --profile
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import platform
import resource
import shlex
import statistics
import time
import warnings

import fairseq
import torch
from fairseq import metrics, options, tasks
from fairseq.data import Dictionary, LanguagePairDataset, ListDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

import fairseq_deep
from fairseq_deep.tools.tables import format_table

ADAM, LOSS = "--optimizer fused_adam", "--criterion fused_label_smoothed_cross_entropy"
SYSTEMS = ("stock", "ours", f"ours {ADAM}", f"ours {LOSS}", f"ours {ADAM} {LOSS}")


def command_line(system, args):
    """The flags of ``fairseq-train`` for *system*."""
    name, *flags = shlex.split(system)
    line = [args.data or "none", "--arch", "transformer" if name == "stock" else f"transformer_{args.norm}norm_6l"]
    for side in ("encoder", "decoder"):
        line += [f"--{side}-layers", str(args.layers), f"--{side}-embed-dim", str(args.dim)]
        line += [f"--{side}-ffn-embed-dim", str(4 * args.dim), f"--{side}-attention-heads", str(args.dim // 64)]
        line += [f"--{side}-normalize-before"] if args.norm == "pre" else []
    for place in ("", "attention-", "activation-"):
        line += [f"--{place}dropout", str(args.inner_dropout if place else args.dropout)]
    if "--optimizer" not in flags:
        line += ["--optimizer", "adam"]
    if "--criterion" not in flags:
        line += ["--criterion", "label_smoothed_cross_entropy"]
    line += ["--label-smoothing", "0.1", "--share-all-embeddings", "--adam-betas", "(0.9, 0.98)", "--lr", "1e-4"]
    line += ["--max-tokens", str(args.tokens), "--clip-norm", str(args.clip_norm), "--cpu", "--seed", "1"]
    return [*line, *flags]


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


def build(system, args, data):
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=command_line(system, args)))
    if data is None:
        task = tasks.setup_task(cfg.task)
        task.load_dataset("train")
    else:
        task = TranslationTask(cfg.task, data[0], data[0])
        task.datasets["train"] = data[1]
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batches(trainer, args):
    """Batches of many lengths, the same for all systems."""
    task = trainer.task
    iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=args.tokens, seed=1, num_workers=0)
    iterator = iterator.next_epoch_itr(shuffle=True)
    return [next(iterator) for _ in range(args.batches)]


def turn(trainer, samples):
    """Seconds, seconds of this process, and the loss after a step for each of *samples*."""
    start, cpu = time.perf_counter(), time.process_time()
    with metrics.aggregate(new_root=True):
        logs = [trainer.train_step([sample]) for sample in samples]
    return time.perf_counter() - start, time.process_time() - cpu, logs[-1]["loss"]


def profile(trainer, samples):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        turn(trainer, samples)
    return record.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)


def serve(system, args, pipe):
    """Run a turn of *system* whenever the other end of *pipe* asks for one; at last, its profile and its memory."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(system, args, None if args.data else made_up(args))
        samples = batches(trainer, args)
    pipe.send(sum(sample["ntokens"] for sample in samples))
    while pipe.recv():
        pipe.send(turn(trainer, samples))
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pipe.send((megabytes, profile(trainer, samples) if args.profile else ""))


def processor():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {"dim": 256, "layers": 6, "vocabulary": 8000, "tokens": 4000, "batches": 4, "rounds": 7, "threads": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--data", metavar="DIR", help="of fairseq-preprocess; without it, random sentences")
    parser.add_argument("--norm", choices=("pre", "post"), default="post")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--inner-dropout", type=float, default=0.0, help="on attention weights and in feed-forward")
    parser.add_argument("--clip-norm", type=float, default=0.0)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--profile", action="store_true", help="say where the time goes, operation by operation")
    args = parser.parse_args()
    context, pipes = multiprocessing.get_context("spawn"), {}
    for system in args.systems:
        pipes[system], other = context.Pipe()
        context.Process(target=serve, args=(system, args, other), daemon=True).start()
        words = pipes[system].recv()
    turns = {system: [] for system in pipes}
    for round in range(args.rounds + 1):
        for system, pipe in pipes.items():
            pipe.send(True)
            result = pipe.recv()
            if round:  # the first warms up
                turns[system].append(result)
    ends = {}
    for system, pipe in pipes.items():
        pipe.send(False)
        ends[system] = pipe.recv()
    report(turns, {system: end[0] for system, end in ends.items()}, words, args)
    for system, (_, table) in ends.items() if args.profile else ():
        print(f"\n{system}\n{table}")


def report(turns, memory, words, args):
    print(f"{processor()}, {args.threads} thread(s); Python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"fairseq {fairseq.__version__}, fairseq_deep {fairseq_deep.__version__}; {args.norm}-norm, "
        f"{args.layers} + {args.layers} layers, width {args.dim}, {args.vocabulary} words, "
        f"{words / args.batches:.0f} target words a batch, dropout {args.dropout}, inside {args.inner_dropout}"
    )
    first = next(iter(turns))
    rows = [("system", "words a second", "CPU s a step", "speed", "by CPU s", "peak MiB", "loss")]
    for system, results in turns.items():
        seconds, cpu = (statistics.median(result[k] for result in results) for k in range(2))
        speed = [statistics.median(base[k] / own[k] for base, own in zip(turns[first], results)) for k in range(2)]
        shown = [words / seconds, cpu / args.batches, *speed, memory[system], results[-1][2]]
        rows.append((system, *(f"{number:.{digits}f}" for number, digits in zip(shown, (0, 3, 3, 3, 0, 3)))))
    print(format_table(rows, right=range(1, 7)))


if __name__ == "__main__":
    main()
