"""How a fresh depth-wise LSTM takes depth: what rounding becomes, and how far gradients reach.

For several depths and starts of the forget gate's bias: the mean difference between the outputs in bf16 and in fp32,
relative to the outputs' standard deviation; and the gradient norm of the first layer's attention output over that of
the last.

    python benchmarks/lstm_depth.py [--dim 256]
"""

import argparse
import copy
import sys

import torch
from fairseq.data import Dictionary

from fairseq_deep.plugin.architectures import build_architecture

SYSTEMS = (
    ("plain pre-norm", "transformer_prenorm_6l", {}),
    ("depth-wise RNN", "transformer_rnn_6l", {}),
    ("LSTM, forget bias 0", "transformer_lstm_6l", {"lstm_forget_bias": 0.0}),
    ("LSTM, forget bias 1", "transformer_lstm_6l", {"lstm_forget_bias": 1.0}),
    ("LSTM, forget bias 2", "transformer_lstm_6l", {"lstm_forget_bias": 2.0}),
    ("LSTM, forget bias 3", "transformer_lstm_6l", {"lstm_forget_bias": 3.0}),
    ("LSTM, forget bias 5 (default)", "transformer_lstm_6l", {}),
)


def measure(model, source, lengths, target):
    """Relative difference of bf16, and the gradient ratios of encoder and decoder."""
    with torch.no_grad():
        rough = copy.deepcopy(model).bfloat16()(source, lengths, target)[0].float()
    outputs = {"encoder": [], "decoder": []}

    def keeper(kept):
        def hook(layer, inputs, output):
            x = output[0] if isinstance(output, tuple) else output
            x.retain_grad()
            kept.append(x)

        return hook

    for side, kept in outputs.items():
        for layer in getattr(model, side).layers:
            layer.register_forward_hook(keeper(kept))
    exact = model(source, lengths, target)[0]
    torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten()).backward()
    ratios = [float(kept[0].grad.norm() / kept[-1].grad.norm()) for kept in outputs.values()]
    return float((exact.detach() - rough).abs().mean() / exact.detach().std()), *ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dictionary = Dictionary()
    for index in range(1000 - len(dictionary)):
        dictionary.add_symbol(str(index))
    print(f"torch {torch.__version__}, width {options.dim}, 16 x 20 tokens, vocabulary 1000, seed {options.seed}\n")
    print(f"{'':21}{'layers':>8}{'bf16 error':>12}{'encoder':>10}{'decoder':>10}   (gradient first / last layer)")
    for label, name, flags in SYSTEMS:
        for depth in (6, 12, 24):
            torch.manual_seed(options.seed)
            widths = {"encoder_embed_dim": options.dim, "encoder_layers": depth, "decoder_layers": depth}
            if "prenorm" in name:
                widths["encoder_ffn_embed_dim"] = 4 * options.dim
            model = build_architecture(name, dictionary, **flags, **widths).eval()
            source, target = torch.randint(5, 1000, (2, 16, 20))
            error, encoder, decoder = measure(model, source, torch.full((16,), 20), target)
            print(f"{label:21}{depth:>8}{error:12.4f}{encoder:10.2f}{decoder:10.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
