"""write a model for other programs: fairseq's `transformer`, transformers (Hugging Face), CTranslate2, torch.export

A trained model that differs from fairseq's only in depth or initialisation is a `transformer`, which stock fairseq
loads without --user-dir. Constant factors on branches (--residual completep, layerscale, layernorm-scaling, and prores
or branchnorm after their schedule) are folded into the weights; for transformers and CTranslate2, so are the weights of
DeepNet and Admin. Structures that the format does not support are rejected. The format torch supports all methods: it
stores the encoder and a decoding step as programs of torch.export in one file.
"""

import argparse
import os
import re

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.plain import Unsupported
from fairseq_deep.tools import translate
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.ctranslate2_format import CTranslate2
from fairseq_deep.tools.fairseq_format import write_fairseq
from fairseq_deep.tools.huggingface_format import Transformers
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_new_folder, check_output_path, new_folder, replacing
from fairseq_deep.tools.torch_format import TorchExport
from fairseq_deep.tools.trained import Trained

EXAMPLE = "fairseq-deep export model --format ctranslate2 --quantization int8 --output model.ct2"
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")
FORMATS = {"ctranslate2": CTranslate2, "huggingface": Transformers, "torch": TorchExport}
OTHERS = "use --format torch, or fairseq-deep package (most models)"
"""Alternatives for models that a format does not support."""
DEEP = "; a new deep model with --layer-agg residual --residual completep has all formats"
DTYPES = ("float32", "bfloat16", "float16")
SENTENCES = 200
"""Number of sentences for the check."""
COUNT = {"type": at_least_one, "metavar": "N"}
OPTIONS = {
    ("ctranslate2",): {"--quantization": {"choices": QUANTIZATIONS, "help": "type of the weights (default: float32)"}},
    ("torch",): {
        "--beam": {**COUNT, "help": "beam width of the programs (default: the recipe's, or 4)"},
        "--capacity": {**COUNT, "help": "target positions in the caches (default: 256, or the model's if fewer)"},
        "--dtype": {"choices": DTYPES, "help": "type of the weights and caches (default: float32)"},
    },
    ("ctranslate2", "huggingface", "torch"): {
        "--verify": {"metavar": "FILE", "help": "source text for the check (default: the recipe's test set)"},
        "--verify-sentences": {**COUNT, "help": f"number of sentences for the check (default: {SENTENCES})"},
        **dict.fromkeys(("--data", "--source-lang", "--target-lang", "--tokenizer", "--lowercase", "--bpe-codes")),
    },
    ("huggingface", "torch"): {
        "--name": {"metavar": "TEXT", "help": "model name on the card (default: the directory's name)"},
        "--licence --license": {"metavar": "TEXT", "help": "licence on the card, such as MIT or CC-BY-4.0"},
    },
}  # fmt: skip
"""The options that only some formats support; None: an option of `translate.add_parts`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the output, and the options of each format."""
    parser.add_argument("checkpoint", metavar="MODEL", help="directory of a recipe, packaged model, or checkpoint")
    parser.add_argument("--output", required=True, metavar="PATH", help="checkpoint, file or new directory to write")
    forms = ("fairseq", *FORMATS)
    parser.add_argument("--format", choices=forms, default="fairseq", help="output format (default: fairseq)")
    for formats, options in OPTIONS.items():
        group = parser.add_argument_group(f"with --format {' or '.join(formats)}")
        for flags, settings in options.items():
            if settings is not None:
                group.add_argument(*flags.split(), **settings)
    translate.add_parts(parser)


def run(args: argparse.Namespace) -> int:
    """Write the model in the chosen format, and compare it with the model before it gets its name."""
    for formats, options in OPTIONS.items():
        for flag in (flags.split()[0] for flags in options):
            if args.format not in formats and getattr(args, flag[2:].replace("-", "_")) is not None:
                raise UsageError(f"{flag} requires --format {' or '.join(formats)}: add that, or omit {flag}")
    try:
        return write_fairseq(args) if args.format == "fairseq" else write(args)
    except Unsupported as error:
        fixed = re.search(": (use|train with) ", error.message)
        deep = DEEP * (" --layer-agg " in error.message)
        raise UsageError(f"{error.message}{deep}; {'or ' * bool(fixed)}{OTHERS}") from error


def write(args: argparse.Namespace) -> int:
    """Write the model for another program than fairseq."""
    check_output(args)
    given = args.verify and [args.verify, *read_lines(args.verify)]
    form = FORMATS[args.format](Trained(args.checkpoint, args))
    with replacing(args.output) if args.format == "torch" else new_folder(args.output) as place:
        form.write(place)
        found = form.check(place, args.verify_sentences or SENTENCES, given)
        form.finish(place, found)
    print(f"{form.trained.path} -> {args.output}: {form.made}; {found}")
    return 0


def check_output(args: argparse.Namespace) -> None:
    """Raise `UsageError` if the output exists or cannot be written."""
    path = args.output
    if args.format != "torch":
        check_new_folder(path)
    elif not path.endswith(".pt2"):
        raise UsageError(f"--output {path} must end in .pt2, torch's suffix of the format")
    elif os.path.lexists(path):
        raise UsageError(f"cannot write {path}: it exists; give another name")
    else:
        check_output_path(path)
