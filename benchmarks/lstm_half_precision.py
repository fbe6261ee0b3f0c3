"""Do gates and cell of a 24 + 24 layer depth-wise LSTM stay in range while it trains in half precision?

Runs fairseq-train on binarised data and prints, at some updates, the loss, the largest |Cell|, |Out| and attention
output |A| of all layers since the last line, how many of their values were not finite, and the loss scale of fp16.

    python benchmarks/lstm_half_precision.py DATA_BIN [--precision bf16] [--updates 2000] [-- FAIRSEQ_TRAIN_FLAGS]
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from fairseq_cli import train

from fairseq_deep.core.aggregators.lstm import DepthwiseLstm


class Watch:
    """Largest magnitudes and non-finite values since the last call of :meth:`reset`."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.largest = {"Cell": 0.0, "Out": 0.0, "A": 0.0}
        self.not_finite = 0

    def tensor(self, name, x):
        x = x.detach()
        self.not_finite += int((~torch.isfinite(x)).sum())
        self.largest[name] = max(self.largest[name], float(x.abs().max()))

    def install(self):
        step, watch = DepthwiseLstm._step, self

        def watched(aggregator, state, index, attention):
            result = step(aggregator, state, index, attention)
            for name, x in (("A", attention), ("Out", result[0]), ("Cell", result[1])):
                watch.tensor(name, x)
            watch.dtype = result[1].dtype
            return result

        DepthwiseLstm._step = watched


class Table(logging.Handler):
    """Prints one line at each update of fairseq's json log."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch
        print(f"{'update':>8}{'loss':>9}{'|Cell|':>9}{'|Out|':>9}{'|A|':>9}{'not finite':>12}{'scale':>9}", flush=True)

    def emit(self, record):
        try:
            entry = json.loads(record.getMessage())
        except ValueError:
            return
        if "num_updates" not in entry or "loss" not in entry:
            return
        sizes = "".join(f"{self.watch.largest[name]:9.2f}" for name in ("Cell", "Out", "A"))
        scale = entry.get("loss_scale", "-")
        loss = float(entry["loss"])
        print(f"{entry['num_updates']:>8}{loss:9.3f}{sizes}{self.watch.not_finite:12}{scale:>9}", flush=True)
        self.watch.reset()


def main():
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--every", type=int, default=100, help="updates between two lines")
    options = parser.parse_args(arguments[:split])
    watch = Watch()
    watch.install()
    package = Path(__file__).parents[1] / "fairseq_deep"
    with tempfile.TemporaryDirectory() as folder:
        flags = f"""--arch transformer_lstm_24l24l --encoder-embed-dim {options.dim}
            --encoder-attention-heads 4 --decoder-attention-heads 4 --share-all-embeddings
            --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas (0.9,0.98)
            --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 600 --max-tokens {options.max_tokens}
            --max-update {options.updates} --seed 1 --save-dir {folder} --no-save --disable-validation
            --log-format json --log-interval {options.every}""".split()
        flags = [options.data, "--user-dir", str(package), *flags, *arguments[split + 1 :]]
        if options.precision != "fp32":
            flags.append(f"--{options.precision}")
        print(f"torch {torch.__version__}, {options.precision}, 24 + 24 layers, width {options.dim}, "
              f"{options.max_tokens} tokens an update\n")  # fmt: skip
        progress = logging.getLogger("fairseq.logging.progress_bar")
        progress.addHandler(Table(watch))
        progress.setLevel(logging.INFO)
        progress.propagate = False
        logging.getLogger().setLevel(logging.WARNING)
        sys.argv[1:] = flags
        train.cli_main()
    print(f"\ncell in {watch.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
