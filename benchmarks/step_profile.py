"""Profile of beam search on a CPU, with and without the compiled kernels, next to a lower bound of its time.

    python benchmarks/step_profile.py [--sentences 32 1] [--precision fp32 int8] [--dim 256 --vocabulary 8000]
    python benchmarks/step_profile.py --modern --encoder-layers 12 --decoder-layers 1 --length 12

Random sentences of 25 words, as many steps, beam 4, a random plain model of 6 + 6 layers, one thread. Times are medians
of rounds, in milliseconds per step. Timers around the calls measure "layers", "projection" and "candidates". "encoder"
is the time of the encoder divided by the number of steps; "rest" is embedding, bookkeeping, reordering and Python.

The floor counts the products and the bytes of the decoder's layers and its projection. Products run
at the rate that the kernels reach for 512 rows of this width. Weights, and keys and values of source and target, are
read once per step at the bandwidth of a 256 MB copy. The floor of a layer is the larger of the two.
"""

import argparse
import statistics
import time

import torch

from fairseq_deep.core.decoding import decode_in, describe
from fairseq_deep.core.native import library
from fairseq_deep.core.native.packed import NativeLinear
from fairseq_deep.core.search import BeamSearch, SearchOptions, beam_search
from fairseq_deep.core.stack import Stack
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.tools.tables import format_table

BEAM = 4
MODERN = {"ffn": "swiglu", "norm": "rms", "positions": "rotary"}  # transformer_modern without its factor


class Timer:
    """Seconds in calls of functions, by part."""

    def __init__(self):
        self.seconds = dict.fromkeys(("encoder", "layers", "projection", "candidates"), 0.0)

    def around(self, part, function):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            return result

        return timed


def build(options, precision):
    torch.manual_seed(0)
    sizes = {"ffn_dim": 4 * options.dim, "heads": options.dim // 64, "pre_norm": True}
    sizes.update(MODERN if options.modern else {})
    depths = {"encoder": options.encoder_layers, "decoder": options.decoder_layers}
    stacks = {side: Stack(depth, options.dim, side=side, **sizes) for side, depth in depths.items()}
    model = Transformer.build(stacks, options.vocabulary).prepare_for_decoding()
    decode_in(model, precision)
    return model


def measure(model, sentences, length, rounds):
    """Milliseconds a step by part: medians of *rounds*."""
    timer, found = Timer(), []
    decoder = model.decoder
    decoder.run_layers = timer.around("layers", type(decoder).run_layers.__get__(decoder))
    projection = decoder.output_projection
    projection.forward = timer.around("projection", type(projection).forward.__get__(projection))
    model.encoder.forward = timer.around("encoder", type(model.encoder).forward.__get__(model.encoder))
    plain = beam_search.best_candidates, beam_search.log_normaliser
    beam_search.best_candidates, beam_search.log_normaliser = (timer.around("candidates", each) for each in plain)
    search = BeamSearch([model], SearchOptions(beam=BEAM, max_len_a=0, max_len_b=length - 1, min_len=length - 1))
    source = torch.randint(4, model.encoder.embed_tokens.num_embeddings, (sentences, length))
    for turn in range(rounds + 1):
        timer.seconds = dict.fromkeys(timer.seconds, 0.0)
        start = time.perf_counter()
        search(source)
        parts = {**timer.seconds, "whole": time.perf_counter() - start}
        parts["rest"] = parts["whole"] - sum(timer.seconds.values())
        if turn:
            found.append({name: 1e3 * value / length for name, value in parts.items()})
    beam_search.best_candidates, beam_search.log_normaliser = plain
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def rate(options, precision):
    """Multiplications and additions a second of the kernels, for many rows."""
    weight, x = torch.randn(options.dim, options.dim), torch.randn(512, options.dim)
    whole = weight.clamp(-1, 1).mul(127).to(torch.int8)
    linear = NativeLinear(weight) if precision == "fp32" else NativeLinear(whole, torch.ones(options.dim))
    return 2 * 512 * options.dim**2 / fastest(lambda: linear(x, None))


def bandwidth():
    """Bytes a second that a copy reads."""
    source = torch.ones(64_000_000)
    target = torch.empty_like(source)
    return 256e6 / fastest(lambda: target.copy_(source), rounds=5)


def fastest(function, rounds=30):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def floor(options, precision, sentences):
    """Milliseconds a step: those of products, those of bytes, and the floor."""
    dim, rows, words, length = options.dim, sentences * BEAM, options.vocabulary, options.length
    weights = {"layer": 14 * dim**2, "projection": words * dim}
    keys = {"layer": 4 * 2 * dim * sentences * (length + BEAM * length / 2), "projection": 0}
    size = 4 if precision == "fp32" else 1
    speed, width, total = rate(options, precision), bandwidth(), [0.0, 0.0, 0.0]
    for part, count in (("layer", options.decoder_layers), ("projection", 1)):
        products, read = 2 * rows * weights[part] / speed, (size * weights[part] + keys[part]) / width
        for place, value in enumerate((products, read, max(products, read))):
            total[place] += 1e3 * count * value
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", nargs="+", type=int, default=[32, 1])
    parser.add_argument("--precision", nargs="+", default=["fp32", "int8"], choices=("fp32", "int8"))
    numbers = {"dim": 256, "vocabulary": 8000, "rounds": 9, "encoder-layers": 6, "decoder-layers": 6, "length": 25}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--modern", action="store_true", help="RMSNorm, SwiGLU and rotary positions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; {describe()}\n")
    parts = ("whole", "layers", "projection", "candidates", "encoder", "rest")
    rows = [("sentences", "precision", "decoding with", *parts, "floor: products", "bytes", "floor")]
    for precision in options.precision:
        for sentences in options.sentences:
            with torch.no_grad():
                least = [f"{value:.2f}" for value in floor(options, precision, sentences)]
            for name, enabled in (("torch", False), ("kernels", True)):
                library.enabled = enabled
                found = measure(build(options, precision), sentences, options.length, options.rounds)
                library.enabled = True
                rows.append((sentences, precision, name, *(f"{found[part]:.2f}" for part in parts), *least))
    print(format_table([tuple(map(str, row)) for row in rows], right=range(3, len(rows[0]))))


if __name__ == "__main__":
    main()
