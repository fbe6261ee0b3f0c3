"""Does CTranslate2 translate as this package does? The share of equal sentences, in float32, of a model that it takes.

    pip install ctranslate2
    python benchmarks/ctranslate2_agreement.py exp/demo --input news.en [more.en] [--sentences 500]

The model (the folder of a recipe, or a checkpoint) is exported by `fairseq-deep export --format ctranslate2`. Each text
goes through the same sub-words, both searches and the same way back; two sentences are equal if their units are.
Where they are not, the table says by how much the scores of the two hypotheses differ (each as its own search has it;
nats over length^lenpen), and how many are as long as allowed in either search, which fairseq and CTranslate2 end
differently. `--lenpen` and `--beam` are given to both.
"""

import argparse
import logging
import math
import os
import tempfile
import time

import torch
from against_ctranslate2 import describe_machine

from fairseq_deep import cli
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.tools import export
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.tables import format_table


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a recipe, or checkpoint")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="raw text, a sentence a line")
    parser.add_argument("--sentences", type=int, help="the first so many of each file (default: all)")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--lenpen", type=float, default=0.6)
    parser.add_argument("--longest", type=int, default=200, help="units of a hypothesis at most (default: 200)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", help="folder of the dictionaries of a checkpoint that stands alone")
    parser.add_argument("--bpe-codes", help="its merges")
    return parser.parse_args(words)


class Ours(Translator):
    """The translator of this package, which gives units."""

    def _finish(self, hypothesis):
        units = self.target.decode(hypothesis["tokens"].tolist()).split()
        return units, float(hypothesis["score"])

    def units(self, lines):
        """(units, score) of the best hypothesis of each of *lines*."""
        return [found[0] for found in self.translate_nbest(lines)]


class Theirs:
    """CTranslate2 with the model in *folder*."""

    def __init__(self, folder, text, args):
        import ctranslate2

        logging.getLogger("ctranslate2").setLevel(logging.ERROR)
        self.text = text
        self.translator = ctranslate2.Translator(
            folder, compute_type="float32", intra_threads=args.threads, inter_threads=1
        )
        self.options = {
            "beam_size": args.beam,
            "length_penalty": args.lenpen,
            "max_decoding_length": args.longest,
            "max_batch_size": args.batch_size,
            "return_scores": True,
        }

    def units(self, lines):
        sources = [self.text.prepare(line).split() for line in lines]
        found = self.translator.translate_batch(sources, **self.options)
        return [(each.hypotheses[0], each.scores[0]) for each in found]


def compare(lines, ours, theirs, longest):
    """A row of the table: what two systems made of the same lines."""
    rows, seconds = [], []
    for system in (ours, theirs):
        begin = time.perf_counter()
        rows.append(system.units(lines))
        seconds.append(time.perf_counter() - begin)
    different = [(a, b) for a, b in zip(*rows) if a[0] != b[0]]
    cut = sum(max(len(a[0]), len(b[0])) >= longest for a, b in different)
    gaps = sorted(abs(a[1] - b[1]) for a, b in different)
    same = [abs(a[1] - b[1]) for a, b in zip(*rows) if a[0] == b[0]]
    share = math.floor(1e4 * (1 - len(different) / len(lines))) / 1e4  # 100 % is all of them
    return [
        f"{len(lines)}",
        f"{len(lines) - len(different)}",
        f"{share:.2%}",
        f"{cut}",
        f"{gaps[len(gaps) // 2]:.1e}" if gaps else "-",
        f"{max(same, default=math.nan):.1e}",
        *(f"{value:.1f}" for value in seconds),
    ]


def usable(lines, translator):
    """The lines that have units, and no more than the model has positions for."""
    counts = [len(translator.text.prepare(line).split()) for line in lines]
    return [line for line, count in zip(lines, counts) if 0 < count < translator.max_source]


def run(args, folder):
    torch.set_num_threads(args.threads)
    logging.getLogger("fairseq_deep").setLevel(logging.WARNING)
    bundle = find_bundle(args.model, data=args.data, codes=args.bpe_codes)
    ours = Ours([bundle], batch_size=args.batch_size, cpu=True, beam=args.beam, lenpen=args.lenpen, max_len_a=0,
                max_len_b=args.longest)  # fmt: skip
    output = os.path.join(folder, "model")
    words = ["export", bundle.checkpoint, "--data", bundle.data, "--format", "ctranslate2", "--output", output]
    export.run(cli.parse(words))
    theirs = Theirs(output, ours.text, args)
    head = ["text", "sentences", "equal", "share", "cut off", "different: scores by", "equal: scores by",
            "seconds here", "CTranslate2"]  # fmt: skip
    table = [head]
    for path in args.input:
        lines = usable(read_lines(path)[: args.sentences], ours)
        table.append([os.path.basename(path), *compare(lines, ours, theirs, args.longest)])
    return format_table(table, right=range(1, len(head)))


if __name__ == "__main__":
    arguments = read_arguments()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as work:
        try:
            print(run(arguments, work))
        except UsageError as error:
            raise SystemExit(str(error)) from None
