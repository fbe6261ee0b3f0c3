"""A random model as a package, to be served: its translations differ from sentence to sentence."""

import argparse
import os
import random

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.model import untrained
from tests.helpers.models import PRENORM, make_dictionary, tiny_flags

ENTRIES = 200
POSITIONS = 40


def write_package(folder, source="en", target="de", seed=1):
    """Write a package of a random model, whose units are the words w0, w1, ...; its folder."""
    folder.mkdir()
    data = folder.parent / f"{folder.name}.data"
    data.mkdir()
    for lang in (source, target):
        make_dictionary(ENTRIES).save(str(data / f"dict.{lang}.txt"))
    flags = argparse.Namespace(arch=PRENORM, **tiny_flags(PRENORM, dim=32))
    flags.max_source_positions = flags.max_target_positions = POSITIONS
    ARCH_CONFIG_REGISTRY[PRENORM](flags)
    torch.manual_seed(seed)
    entries = Dictionary.load(str(data / f"dict.{source}.txt"))
    model = untrained(flags, entries, entries).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)  # less alike
    tensors, tied = packaged.make_tensors(model, model.state_dict(), None)
    task = {"source_lang": source, "target_lang": target, "left_pad_source": True, "left_pad_target": False,
            "max_source_positions": POSITIONS, "max_target_positions": POSITIONS}  # fmt: skip
    search = {"beam": 3, "lenpen": 0.6, "max_len_a": 0.0, "max_len_b": 8, "gnmt_lenpen": False}
    config = packaged.make_config(
        f"random {source}-{target}", "none", flags, tied, task=task, search=search,
        text={"tokenizer": "none", "lowercase": False, "sub_words": None}, criterion={"label_smoothing": 0.1},
        made_with={"torch": torch.__version__},
    )  # fmt: skip
    packaged.write(os.fspath(folder), packaged.Content(config, tensors, os.fspath(data), None, "card\n"))
    return folder


def random_lines(count, seed=5):
    """Different lines of one to eight words."""
    rng = random.Random(seed)
    found = {" ".join(f"w{rng.randrange(ENTRIES - 4)}" for _ in range(rng.randint(1, 8))): None for _ in range(2 * count)}
    return list(found)[:count]
