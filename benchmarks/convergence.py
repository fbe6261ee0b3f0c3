"""Which starts let a deep post-norm Transformer train? The same text, updates, batches and learning rate for all.

Trains each system with each seed through fairseq-train and prints the validation perplexity, beside that of the
unigram distribution of the training text: a model that stays there has learned nothing of the source. A finished run is
not repeated, so that the same command goes on where it was stopped.

    python benchmarks/convergence.py DATA_BIN --exp FOLDER [--layers 18 24] [--seeds 3] [-- FAIRSEQ_TRAIN_FLAGS]
"""

import argparse
import collections
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fairseq.data import Dictionary, data_utils

import fairseq_deep
from fairseq_deep.tools import figures, format_table, write_text

PACKAGE = os.path.dirname(fairseq_deep.__file__)
# architecture (its depth and width are set below) and what makes the system
SYSTEMS = {
    "xavier": ("transformer_postnorm_6l", "--deep-init", "xavier"),
    "lipschitz": ("transformer_lipschitz_postnorm_6l",),
    "ds": ("transformer_postnorm_6l", "--deep-init", "ds"),
    "deepnet": ("transformer_postnorm_6l", "--deep-init", "deepnet"),
    "admin": ("transformer_postnorm_6l", "--deep-init", "admin"),
    "dlcl": ("transformer_postnorm_6l", "--deep-init", "xavier", "--layer-agg", "dlcl"),
    "prenorm": ("transformer_prenorm_6l", "--deep-init", "xavier"),
}
SETTING = """
--share-all-embeddings --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4
--decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4
--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1
--optimizer adam --adam-betas (0.9,0.98) --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 400
--criterion label_smoothed_cross_entropy --label-smoothing 0.1
--max-tokens 1000 --max-update 600 --validate-interval-updates 200
--no-save --log-format json --log-interval 20 --log-depth-interval 20
""".split()


def train(data, folder, system, layers, seed, more):
    """Train one system if that has not been done; return its record."""
    log = folder / f"{system}_{layers}l_seed{seed}.log"
    arch, *own = SYSTEMS[system]
    flags = ["--arch", arch, *own, "--encoder-layers", str(layers), "--decoder-layers", str(layers)]
    flags += ["--seed", str(seed), *SETTING, *more]
    if log.exists() and "done training in" in log.read_text():
        if log.read_text().partition("\n")[0] != " ".join(flags):
            raise SystemExit(f"error: {log} is of a run with other flags: give another --exp")
    else:
        command = [sys.executable, "-m", "fairseq_cli.train", data, "--user-dir", PACKAGE, *flags]
        with log.open("w") as stream:
            print(*flags, file=stream, flush=True)
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment())
        if done.returncode:
            raise SystemExit(f"error: {system}, {layers} layers, seed {seed} failed: see {log}")
    return {"system": system, "layers": layers, "seed": seed, "flags": flags, **curves(log)}


def environment():
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def curves(log):
    """From fairseq's json log: perplexities by update, and the gradient norms of the first and last layers."""
    valid, gradients = {}, collections.defaultdict(dict)
    for line in log.read_text().splitlines():
        kind, _, entry = line.rpartition(" | ")
        if kind.endswith("| valid"):
            entry = json.loads(entry)
            valid[int(entry["valid_num_updates"])] = float(entry["valid_ppl"])
        elif kind.endswith("| train_inner"):
            entry = json.loads(entry)
            for name, value in entry.items():
                if name.startswith("gnorm_"):
                    gradients[name[len("gnorm_") :]][int(entry["num_updates"])] = float(value)
    return {"valid_ppl": valid, "gradients": gradients}


def unigram_perplexity(data):
    """Of the validation targets under the token frequencies of the training targets (each token counted once more)."""
    (source, target) = next(Path(data).glob("train.*-*.*.idx")).name.split(".")[1].split("-")
    dictionary = Dictionary.load(f"{data}/dict.{target}.txt")
    tokens = {}
    for split in ("train", "valid"):
        texts = data_utils.load_indexed_dataset(f"{data}/{split}.{source}-{target}.{target}", dictionary)
        tokens[split] = collections.Counter(token for index in range(len(texts)) for token in texts[index].tolist())
    total = sum(tokens["train"].values()) + len(dictionary)
    entropy = -sum(count * math.log((tokens["train"][token] + 1) / total) for token, count in tokens["valid"].items())
    return math.exp(entropy / sum(tokens["valid"].values()))


def table(records, unigram):
    head = ("system", "layers", "seeds", "ppl", "lowest", "highest", "d1/dM at start", "smallest", "at the end")
    rows = [head]
    for system, layers in dict.fromkeys((record["system"], record["layers"]) for record in records):
        runs = [record for record in records if (record["system"], record["layers"]) == (system, layers)]
        last = [perplexity for run in runs for perplexity in list(run["valid_ppl"].values())[-1:]]
        ratios = [ratio(run["gradients"], layers) for run in runs]
        middle = [f"{statistics.median(values):.3g}" for values in zip(*ratios)]
        cells = (f"{value:,.1f}" for value in (statistics.median(last), min(last), max(last)))
        rows.append((system, str(layers), str(len(runs)), *cells, *middle))
    note = (
        f"ppl: validation perplexity at the end: median, lowest and highest of the seeds; unigram {unigram:,.1f}\n"
        "d1/dM: gradient norm of the first decoder layer over the last's: at the start, smallest, at the end (medians)"
    )
    return f"{format_table(rows, right=range(1, len(head)))}\n{note}"


def ratio(gradients, layers):
    first, last = gradients["dec_1"], gradients[f"dec_{layers}"]
    values = [first[update] / last[update] if last[update] else float("nan") for update in first]
    return values[0], min(values), values[-1]


def draw(records, path):
    """Fig. 4 of Zhang et al., 2019: gradient norms of the first and last layers while the first seeds train."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    layers = records[0]["layers"]
    columns = min(4, len(systems))
    rows = math.ceil(len(systems) / columns)
    figure = figures.new_figure(2.4 * columns, 2.2 * rows + 0.4)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel in panels[len(systems) :]:
        panel.remove()
    for panel, system in zip(panels, systems):
        run = next(record for record in records if (record["system"], record["layers"]) == (system, layers))
        for colour, part in zip(figures.COLOURS, ("enc_1", f"enc_{layers}", "dec_1", f"dec_{layers}")):
            curve = run["gradients"][part]
            panel.plot(list(curve), list(curve.values()), color=colour, linewidth=1.2, label=part.replace("_", " "))
        panel.set_yscale("log")
        panel.set_title(f"{system}, {layers} layers", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    figure.supylabel("gradient norm", fontsize=9)
    figure.supxlabel("update", fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figures.save_figure(figure, str(path))


def main():
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", help="binarised data")
    parser.add_argument("--exp", required=True, type=Path, help="folder of the logs and results")
    parser.add_argument("--layers", type=int, nargs="+", default=[18], help="of encoder and decoder each")
    parser.add_argument("--seeds", type=int, default=3, help="1 ... N")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    args = parser.parse_args(arguments[:split])
    args.exp.mkdir(parents=True, exist_ok=True)
    runs = [(s, n, seed) for n in args.layers for seed in range(1, args.seeds + 1) for s in args.systems]
    records, start = {}, time.time()
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(train, args.data, args.exp, *run, arguments[split + 1 :]): run for run in runs}
        for future in as_completed(waiting):
            run = waiting[future]
            records[run] = future.result()
            update, perplexity = list(records[run]["valid_ppl"].items())[-1]
            print(
                f"{len(records)}/{len(runs)} {run[0]}, {run[1]} layers, seed {run[2]}: perplexity {perplexity:,.1f} "
                f"after {update} updates ({(time.time() - start) / 60:.0f} min)",
                flush=True,
            )
    ordered = [records[run] for run in sorted(runs, key=lambda run: (run[1], args.systems.index(run[0]), run[2]))]
    unigram = unigram_perplexity(args.data)
    write_text(str(args.exp / "results.json"), json.dumps({"unigram": unigram, "runs": ordered}, indent=1) + "\n")
    text = table(ordered, unigram)
    write_text(str(args.exp / "table.txt"), text + "\n")
    draw(ordered, args.exp / "gradients.svg")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
