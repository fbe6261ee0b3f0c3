"""What DLCL costs in training: bytes saved for the backward pass, and the time of a step, at 30 base-width layers.

Three models on the same batch: the plain pre-norm stack, DLCL with the sum over a stacked history (as the equation
reads, and as the original code has it), and DLCL as this package computes it.

    python benchmarks/dlcl_memory.py [--device cuda] [--dtype bfloat16] [--sentences 128 --length 32]
"""

import argparse
import statistics
import sys
import time

import torch
from fairseq.data import Dictionary
from torch.autograd.graph import saved_tensors_hooks

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.plugin.architectures import build_architecture


def stacked_sum(weights, state):
    """The naive combination: a product of all entries, then its sum."""
    history = torch.stack(state)
    weights = weights.to(history.dtype).view(-1, *[1] * (history.dim() - 1))
    return (history * weights).sum(0)


class StackedDlcl(Dlcl):
    """The sums as the equation reads. The state is the list of entries."""

    def start(self, x):
        return [x.contiguous()]

    def read(self, state, layer):
        return self.dropout(stacked_sum(self.weight[layer, : layer + 1], state))

    def write(self, state, layer, output):
        return state + [self._norm(output, layer)]


def build(name, options, dictionary):
    torch.manual_seed(1)
    model = build_architecture(
        name,
        dictionary,
        share_all_embeddings=True,
        encoder_layers=options.layers,
        encoder_embed_dim=options.dim,
        encoder_ffn_embed_dim=4 * options.dim,
    )
    return model.to(options.device, getattr(torch, options.dtype)).train()


def saved_bytes(run, model):
    """Bytes that autograd keeps between forward and backward, each storage once and without the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def step_seconds(run, options):
    """Median time of forward and backward."""
    times = []
    for step in range(options.steps + 1):
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run().backward()
        if options.device == "cuda":
            torch.cuda.synchronize()
        if step > 0:  # the first warms up
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    dictionary = Dictionary()
    for index in range(options.vocab - len(dictionary)):
        dictionary.add_symbol(str(index))
    shape = (options.sentences, options.length)
    tokens = torch.randint(5, options.vocab, shape, device=options.device)
    lengths = torch.full((options.sentences,), options.length, device=options.device)

    def runner(model):
        return lambda: model(tokens, lengths, tokens)[0].float().mean()

    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {options.dtype}")
    print(f"{options.layers} + 6 layers, width {options.dim}, batch {shape[0]} x {shape[1]} tokens\n")
    print(f"{'model':<22}{'saved MiB':>12}{'x plain':>10}{'step s':>10}{'x plain':>10}")
    plain = None
    plain_name, dlcl_name = "transformer_prenorm_30l", "transformer_dlcl_30l"
    rows = (("plain pre-norm", plain_name), ("DLCL, stacked history", dlcl_name), ("DLCL, ours", dlcl_name))
    for label, name in rows:
        model = build(name, options, dictionary)
        if "stacked" in label:
            model.encoder.aggregator.__class__ = model.decoder.aggregator.__class__ = StackedDlcl
        run = runner(model)
        result = (saved_bytes(run, model), step_seconds(run, options))
        plain = plain or result
        print(f"{label:<22}{result[0] / 2**20:>12.1f}{result[0] / plain[0]:>10.3f}"
              f"{result[1]:>10.3f}{result[1] / plain[1]:>10.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
