"""Time of one decoding step against its position: self-attention, and what merged attention has in its place.

One layer with its reordering by beam search, for all hypotheses of a batch; the attention to the source, which both
have, is left out.

    python benchmarks/decoding_length.py [--dim 512] [--sentences 32 --beam 4] [--plot step_time.svg] [--device cuda]
"""

import argparse
import statistics
import time

import torch

from fairseq_deep.core.attention import MultiheadAttention, RunningMean, SharedBeamState
from fairseq_deep.core.decoding import pack_linear
from fairseq_deep.tools import pictures
from fairseq_deep.tools.tables import format_table

POSITIONS = (16, 32, 64, 128, 256, 512)


def _step(part, x, state):
    return part.beam_state(state, part.sentences, x, torch.ones(x.size(1), 1, dtype=torch.bool, device=x.device))


class MergedPart(torch.nn.Module):
    """The mean of the target's values: one product and a running sum."""

    def __init__(self, dim, sentences):
        super().__init__()
        self.sentences = sentences
        self.beam_state = SharedBeamState(attends=False, averages=True)
        self.v_proj = torch.nn.Linear(dim, dim)
        self.mean = RunningMean()

    def forward(self, x, state):
        return self.mean(self.v_proj(x), None, True, state, _step(self, x, state))

    def reorder(self, state, order):
        decided = self.beam_state.reorder(state, order)
        if decided is not None:
            self.mean.reorder(state, decided)


class SelfPart(torch.nn.Module):
    """Queries, keys, values, attention, output projection, and the mask that all layers of a decoder share."""

    def __init__(self, dim, sentences):
        super().__init__()
        self.sentences = sentences
        self.beam_state = SharedBeamState()
        self.attention = MultiheadAttention(dim, dim // 64, causal=True)
        self.attention.make_generation_fast_("self_attn")

    def forward(self, x, state):
        return self.attention(x, incremental_state=state, step=_step(self, x, state))[0]

    def reorder(self, state, order):
        decided = self.beam_state.reorder(state, order)
        if decided is not None:
            self.attention.own_cache.reorder(state, decided)


def step_times(part, options):
    """Median milliseconds of the steps just before each of POSITIONS."""
    rows, state, times = options.sentences * options.beam, {}, []
    x = torch.randn(1, rows, options.dim, device=options.device)
    order = torch.arange(rows, device=options.device).view(-1, options.beam).flip(1).flatten()
    for _ in range(max(POSITIONS)):
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        part.reorder(state, order)
        part(x, state)
        if options.device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return [statistics.median(times[position - 9 : position]) for position in POSITIONS]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"dim": 512, "sentences": 32, "beam": 4, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    with torch.no_grad():
        for name, kind in (("self-attention", SelfPart), ("merged attention", MergedPart)):
            part = torch.nn.Sequential(kind(options.dim, options.sentences)).to(options.device).eval()
            pack_linear(part)
            step_times(part[0], options)  # warm up
            results[name] = step_times(part[0], options)
    rows = [("ms a step at position", *map(str, POSITIONS))]
    rows += [(name, *(f"{value:.3f}" for value in values)) for name, values in results.items()]
    print(format_table(rows, right=range(1, len(rows[0]))))
    if options.plot:
        figure = pictures.new_figure(4.6, 3.0)
        axes = figure.subplots()
        for colour, (name, values) in zip(pictures.COLOURS, results.items()):
            axes.plot(POSITIONS, values, color=colour, marker="o", markersize=3.5, linewidth=1.3, label=name)
        axes.set_xlabel("position in the target")
        axes.set_ylabel("ms a step and layer")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        pictures.save_figure(figure, options.plot)


if __name__ == "__main__":
    main()
