"""export a trained model as one pickle-free directory

The directory contains weights (safetensors), settings (JSON), dictionaries, merges, a card and checksums. fairseq-deep
translate, from_pretrained and fairseq-generate load it, and give the translations of the checkpoint.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import other_formats, packaged
from fairseq_deep.runtime.exported import program_of
from fairseq_deep.tools import translate
from fairseq_deep.tools.card import UNKNOWN_LICENCE, counts, make_card, record_of, versions
from fairseq_deep.tools.output_files import check_new_folder, new_folder
from fairseq_deep.tools.trained import Trained

EXAMPLE = "fairseq-deep package checkpoint_best.pt --data data-bin --bpe-codes code --output model"
DTYPES = ("float16", "bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the output directory, entries of the card, and the parts of a single checkpoint."""
    add = parser.add_argument
    add("model", metavar="RUN", help="directory of a recipe (of one seed), or checkpoint")
    add("--output", required=True, metavar="DIR", help="directory to create")
    add("--dtype", choices=DTYPES, help="type of the weights (default: as in the checkpoint)")
    add("--name", metavar="TEXT", help="model name on the card (default: the name of DIR)")
    licence = "licence on the card, such as MIT or CC-BY-4.0"
    add("--licence", "--license", default=UNKNOWN_LICENCE, metavar="TEXT", help=licence)
    translate.add_parts(parser)


def run(args: argparse.Namespace) -> int:
    """Write the package, and verify it before it is renamed to its final name."""
    output = os.path.abspath(args.output)
    check_new_folder(args.output)
    other_formats.reject(args.model)
    if packaged.is_package(args.model) and not program_of(args.model):
        raise UsageError(f"{args.model} is already a packaged model: copy the directory")
    content = collect(args, os.path.basename(output))
    with new_folder(output) as folder:
        packaged.write(folder, content)
        check_written(folder, content)
    size = sum(os.path.getsize(os.path.join(output, name)) for name in os.listdir(output))
    print(f"{args.model} -> {args.output}: {', '.join(sorted(os.listdir(output)))} ({size:,} bytes)")
    return 0


def collect(args: argparse.Namespace, name: str) -> Any:
    """Return the `Content` of the package."""
    trained = Trained(args.model, args)
    loaded, stored, bundle = trained.loaded, trained.loaded.stored, trained.bundle
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        tensors, tied = packaged.make_tensors(loaded.model, stored.tensors, dtype)
        config = packaged.make_config(
            args.name if args.name is not None else name, args.licence, stored.flags, tied,
            task={**stored.task, "source_lang": loaded.source_lang, "target_lang": loaded.target_lang},
            text=trained.text, search=trained.search, criterion={"label_smoothing": stored.label_smoothing},
            made_with=versions(),
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"{trained.path} cannot be packaged: {error}") from error
    names = packaged.text_files(config)
    paths = [*(os.path.join(bundle.data, name) for name in names[:2]), bundle.codes]
    texts = {name: Path(path).read_bytes() for name, path in zip(names, paths)}
    texts["README.md"] = make_card(config, counts(loaded, tensors), record_of(args.model)).encode()
    return packaged.Content(config, tensors, texts)


def check_written(folder: str, content: Any) -> None:
    """Load the package like a user, and compare the tensors.

    Raises:
        UsageError: the package differs from *content*
    """
    found = packaged.load(folder).tensors
    owners = {**{name: name for name in content.tensors}, **content.config["tied"]}
    same = found.keys() == owners.keys() and all(
        torch.equal(found[name], content.tensors[owner]) and found[name].dtype == content.tensors[owner].dtype
        for name, owner in owners.items()
    )
    if not same:
        raise UsageError(f"cannot write {folder}: the written files differ when read back; check the disk")
