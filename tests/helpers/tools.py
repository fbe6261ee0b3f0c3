"""Files for the sub-commands of ``fairseq-deep``."""

import argparse
from collections import OrderedDict

import torch

from tests.helpers.paths import PACKAGE

GENERATE = ["--user-dir", PACKAGE, "--beam", "3", "--lenpen", "0.8", "--max-len-a", "1", "--max-len-b", "50", "--cpu"]
EMPTY = ("._float_tensor", ".version")  # entries of a state that are no weights


def checkpoint(path, model, maximize=None, **others):
    """Save `model` at `path` the way fairseq does, and return the path as text."""
    config = {"model": argparse.Namespace(arch="transformer_x"), "checkpoint": {}}
    if maximize is not None:
        config["checkpoint"]["maximize_best_checkpoint_metric"] = maximize
    state = {
        "args": None,
        "cfg": config,
        "model": OrderedDict(model),
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": {"state": {}},
        **others,
    }
    torch.save(state, path)
    return str(path)
