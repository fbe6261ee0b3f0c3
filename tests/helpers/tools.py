"""Sub-commands of ``fairseq-deep`` in this process, and files for them."""

import argparse
from collections import OrderedDict

import torch

from fairseq_deep.cli import main
from tests.helpers.paths import PACKAGE

GENERATE = ["--user-dir", PACKAGE, "--beam", "3", "--lenpen", "0.8", "--max-len-a", "1", "--max-len-b", "50", "--cpu"]
EMPTY = ("._float_tensor", ".version")  # entries of a state that are no weights


def failing(command, *more):
    """fails(capsys, *arguments): run the sub-command, which must fail with one line; return that line."""

    def fails(capsys, *arguments):
        assert main([command, *more, *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith(f"fairseq-deep {command}: ")
        return captured.err

    return fails


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
