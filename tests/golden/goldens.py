"""Golden checkpoints: small models as an earlier version wrote them, with what they computed.

``python -m tests.golden.goldens NAME --arch ARCH FLAG ...`` writes another one. It is a dictionary of tensors and plain
values, loadable with ``weights_only``:

    flags         the command line of the model
    resolved      the model's flags after the architecture, as a checkpoint of fairseq holds them
    shapes        {name: shape} of the state dict, in order
    weights       their values one after the other, in bf16, which holds them exactly
    source, target            B x T
    output        logits of source and target, B x T x V
    translations  for each sentence, the hypotheses of a beam of 3: words and score
"""

import argparse
import sys
import zlib
from pathlib import Path

import torch
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.flags import parse
from tests.helpers.models import make_dictionary, task_of
from tests.helpers.tensors import shake

FOLDER = Path(__file__).parent
VOCAB = 12
NARROW = ["--encoder-embed-dim", "8", "--encoder-attention-heads", "2", "--decoder-attention-heads", "2",
          "--encoder-layers", "2", "--decoder-layers", "2", "--share-all-embeddings", "--dropout", "0"]  # fmt: skip


def build(args) -> DeepTransformerModel:
    return DeepTransformerModel.build_model(args, task_of(make_dictionary(VOCAB))).eval()


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
def computed(model, source, target):
    """What a golden has of *source* and *target*."""
    lengths = source.ne(model.encoder.padding_idx).sum(1)
    generator = SequenceGenerator([model], make_dictionary(VOCAB), beam_size=3, max_len_a=0, max_len_b=6, min_len=2)
    hypotheses = generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
    return {
        "source": source,
        "target": target,
        "output": model(source, lengths, target)[0],
        "translations": [[(h["tokens"].tolist(), float(h["score"])) for h in sentence] for sentence in hypotheses],
    }


def load(name):
    """The golden *name*, with ``weights`` as a state dict."""
    golden = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    sizes = [torch.Size(shape).numel() for shape in golden["shapes"].values()]
    pieces = golden["weights"].float().split(sizes)
    golden["weights"] = {key: piece.view(shape) for (key, shape), piece in zip(golden["shapes"].items(), pieces)}
    return golden


def make(name, *flags):
    """Write the golden *name*, of a narrow model with these flags."""
    torch.manual_seed(zlib.crc32(name.encode()))
    flags = [*flags[:2], *NARROW, *flags[2:]]
    args = parse(*flags)
    resolved, model = model_flags(args), shake(build(args), 0.2, around=True)  # norms, biases and gates differ, too
    for parameter in model.parameters():
        parameter.data.copy_(parameter.bfloat16())
    source, target = torch.randint(4, VOCAB, (3, 5)), torch.randint(4, VOCAB, (3, 4))
    source[1, :2] = model.encoder.padding_idx
    target[:, 0], target[2, 3] = model.encoder.dictionary.eos(), model.encoder.padding_idx
    weights = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    one = torch.cat([value.flatten() for value in weights.values()])  # one tensor: a file of a few kB
    golden = {"flags": flags, "resolved": resolved, "shapes": shapes, "weights": one, **computed(model, source, target)}
    torch.save(golden, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    if (FOLDER / f"{sys.argv[1]}.pt").exists():
        sys.exit(f"{sys.argv[1]}.pt is there already: goldens stay as an earlier version wrote them")
    make(*sys.argv[1:])
