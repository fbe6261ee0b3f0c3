"""Speed of the depth-wise LSTM against the plain Transformer: training step and generation, 6 + 6 layers, base width.

The systems take turns, so that whatever else the machine does hits all of them alike. Generation is
fairseq's beam search with a fixed number of steps.

    python benchmarks/lstm_speed.py [--device cuda --dtype float16] [--sentences 32 --length 26] [--rounds 5]
    python benchmarks/lstm_speed.py --systems transformer_postnorm_6l transformer_matt_6l     # any others
"""

import argparse
import statistics
import sys
import time

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator

from fairseq_deep.plugin.architectures import build_architecture

SYSTEMS = (
    ("plain pre-norm", "transformer_prenorm_6l"),
    ("depth-wise LSTM", "transformer_lstm_6l"),
    ("  1-layer hidden", "transformer_lstm_1layer_6l"),
    ("depth-wise RNN", "transformer_rnn_6l"),
)


def multiplications(model, length):
    """Multiply-adds, in millions, of a position's matrix products in a forward pass: encoder, decoder with output."""
    totals = []
    for stack in (model.encoder, model.decoder):
        modules = stack.modules()
        total = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
        gates = getattr(stack.aggregator, "gates", [])
        if len(gates):  # shared: applied once a layer
            total += len(stack.layers) // len(gates) * sum(gate.weight.numel() for gate in gates)
        heads = sum("_attn" in name and name.endswith("q_proj") for name, _ in stack.named_modules())
        totals.append(total + heads * 2 * length * model.encoder.embed_tokens.embedding_dim)
    return [total / 1e6 for total in totals]


def build(name, options, dictionary):
    torch.manual_seed(1)
    flags = {f"{side}_layers": options.layers for side in ("encoder", "decoder")}
    flags["encoder_embed_dim"] = options.dim
    if not name.startswith(("transformer_lstm", "transformer_rnn")):
        flags["encoder_ffn_embed_dim"] = 4 * options.dim
    model = build_architecture(name, dictionary, share_all_embeddings=True, **flags)
    return model.to(options.device, getattr(torch, options.dtype))


def timed(options, run):
    if options.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def training_step(model, optimizer, tokens, lengths):
    def run():
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens, lengths, tokens)[0]
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return run


def generation(model, dictionary, sample, options):
    generator = SequenceGenerator(
        [model], dictionary, beam_size=4, max_len_a=0, max_len_b=options.length, min_len=options.length
    )

    def run():
        model.eval()
        generator.generate([model], sample)
        model.train()

    return run


def measure(options, runs):
    """Median seconds of each of *runs*, which take turns; the first round warms up."""
    times = [[] for _ in runs]
    for _ in range(options.rounds + 1):
        for run, values in zip(runs, times):
            values.append(timed(options, run))
    return [statistics.median(values[1:]) for values in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--length", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", metavar="ARCH", help="architectures in place of those of the LSTM")
    options = parser.parse_args()
    systems = SYSTEMS if options.systems is None else [(name.partition("_")[2], name) for name in options.systems]

    dictionary = Dictionary()
    for index in range(options.vocab - len(dictionary)):
        dictionary.add_symbol(str(index))
    shape = (options.sentences, options.length)
    tokens = torch.randint(5, options.vocab, shape, device=options.device)
    lengths = torch.full((options.sentences,), options.length, device=options.device)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": tokens}}

    models = [build(name, options, dictionary) for _, name in systems]
    steps = [training_step(model, torch.optim.Adam(model.parameters(), 1e-4), tokens, lengths) for model in models]
    decodes = [generation(model, dictionary, sample, options) for model in models]
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {options.dtype}")
    print(f"{options.layers} + {options.layers} layers, width {options.dim}, vocabulary {options.vocab}; "
          f"{shape[0]} sentences of {shape[1]} tokens, beam 4; speed relative to the first row\n")  # fmt: skip
    print(f"{'':18}{'multiply-adds (M)':>20}{'training step':>24}{'generation':>24}")
    print(f"{'':18}{'encoder':>10}{'decoder':>10}{'s':>12}{'speed':>12}{'s':>12}{'speed':>12}")
    trained, decoded = measure(options, steps), measure(options, decodes)
    for (label, _), model, step, decode in zip(systems, models, trained, decoded):
        encoder, decoder = multiplications(model, options.length)
        print(f"{label:18}{encoder:10.2f}{decoder:10.2f}{step:12.3f}{trained[0] / step:12.3f}"
              f"{decode:12.3f}{decoded[0] / decode:12.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
