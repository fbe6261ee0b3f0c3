"""Golden checkpoints: small models as an earlier version wrote them, with what they computed.

A golden is a dictionary of tensors and plain values, loadable with ``weights_only``:

    flags         the command line of the model
    resolved      the model's flags after the architecture, as a checkpoint of fairseq holds them
    shapes        {name: shape} of the state dict, in order
    weights       their values one after the other, in bf16, which holds them exactly
    source, target            B x T
    output        logits of source and target, B x T x V
    translations  for each sentence, the hypotheses of a beam of 3: words and score
"""

import argparse
from pathlib import Path

import torch
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.models import make_dictionary, task_of

FOLDER = Path(__file__).parent
VOCAB = 12
NARROW = ["--encoder-embed-dim", "8", "--encoder-attention-heads", "2", "--decoder-attention-heads", "2",
          "--encoder-layers", "2", "--decoder-layers", "2", "--share-all-embeddings", "--dropout", "0"]  # fmt: skip


def build(args) -> DeepTransformerModel:
    symbols = make_dictionary(VOCAB)
    task = task_of(symbols)
    return DeepTransformerModel.build_model(args, task).eval()


def model_flags(args):
    """The flags in *args* that are about the model."""
    names = set()
    for model in (DeepTransformerModel, TransformerModel):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        model.add_args(parser)
        names.update(action.dest for action in parser._actions)
    names -= {"help"}
    return {name: value for name, value in vars(args).items() if name in names or name == "arch"}


@torch.no_grad()
def outputs(model, source, target):
    """Logits, and the hypotheses of a beam of 3."""
    pad = model.encoder.padding_idx
    lengths = source.ne(pad).sum(1)
    generator = SequenceGenerator([model], make_dictionary(VOCAB), beam_size=3, max_len_a=0, max_len_b=6, min_len=2)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    hypotheses = generator.generate([model], sample)
    translations = [[(h["tokens"].tolist(), float(h["score"])) for h in sentence] for sentence in hypotheses]
    return model(source, lengths, target)[0], translations


def load(name):
    """The golden *name*, with ``weights`` as a state dict."""
    golden = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    sizes = [torch.Size(shape).numel() for shape in golden["shapes"].values()]
    pieces = golden["weights"].float().split(sizes)
    golden["weights"] = {key: piece.view(shape) for (key, shape), piece in zip(golden["shapes"].items(), pieces)}
    return golden
