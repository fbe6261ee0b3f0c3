"""What --log-depth-interval costs: the time of one record beside that of a training step, 18 + 18 layers, base width.

    python benchmarks/depth_log.py [--layers 18] [--dim 512] [--tokens 1024] [--rounds 5]
"""

import argparse
import statistics
import time

import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.plugin.models.depth_log import log_depth


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for flag, value in (("--layers", 18), ("--dim", 512), ("--tokens", 1024), ("--rounds", 5), ("--vocabulary", 32768)):
        parser.add_argument(flag, type=int, default=value)
    args = parser.parse_args()
    dictionary = Dictionary()
    for index in range(args.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(index))
    flags = {f"{side}_layers": args.layers for side in ("encoder", "decoder")}
    flags.update(encoder_embed_dim=args.dim, encoder_ffn_embed_dim=4 * args.dim, share_all_embeddings=True)
    torch.manual_seed(1)
    for name in ("transformer_postnorm_6l", "transformer_dlcl_6l"):
        model = build_architecture(name, dictionary, **flags)
        optimizer = torch.optim.Adam(model.parameters())
        tokens = torch.randint(dictionary.nspecial, len(dictionary), (args.tokens // 32, 32))
        lengths = torch.full((len(tokens),), 32)
        steps, records = [], []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            scores = model(tokens, lengths, tokens)[0]
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            middle = time.perf_counter()
            with metrics.aggregate(new_root=True):
                log_depth(model)
            steps.append(middle - start)
            records.append(time.perf_counter() - middle)
        step, record = (statistics.median(times[1:]) for times in (steps, records))
        share = 100 * record / step
        print(f"{name:24} step {step:7.3f} s   record {1000 * record:6.1f} ms   {share:5.2f} %", flush=True)


if __name__ == "__main__":
    main()
