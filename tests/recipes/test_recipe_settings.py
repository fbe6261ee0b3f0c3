"""Which two commands train the same."""

import shlex

import pytest
from fairseq import options

from fairseq_deep.recipes import changes

BASE = "fairseq-train DATA --arch a --lr 0.1 --adam-betas '(0.9, 0.98)' --fp16 --clip-norm -1 --max-epoch 3"


@pytest.mark.parametrize("other, named", [
    (BASE.replace("DATA", "ELSEWHERE"), ""), (BASE.replace("--max-epoch 3", "--max-epoch 9 --max-update 7"), ""),
    (BASE.replace("--lr 0.1", "--lr 0.5 --lr=0.1"), ""), (f"{BASE} --num-workers 4 --save-interval-updates 3", ""),
    (f"{BASE} --lr=0.2 --arch b", "--arch a, now --arch b; --lr 0.1, now --lr 0.2"),
    (f"{BASE} --seed 7", "without --seed, now --seed 7"), (BASE.replace("--fp16", ""), "--fp16, now without --fp16"),
    (BASE.replace("-1", "-2"), "--clip-norm -1, now --clip-norm -2"),
    (BASE.replace("0.98", "0.99"), "--adam-betas (0.9, 0.98), now --adam-betas (0.9, 0.99)"),
    (f"{BASE} --lr-scheduler inverse_sqrt_cooldown --max-update 7",
     "without --lr-scheduler, now --lr-scheduler inverse_sqrt_cooldown; without --max-update, now --max-update 7"),
])  # fmt: skip
def test_difference_of_two_trainings(other, named):
    assert changes.difference(shlex.split(BASE), shlex.split(other)) == named


def test_flags_that_do_not_count_are_fairseqs():
    """A misspelt one would let nothing through that it should, and nobody would see it."""
    own = {"--compile", "--log-depth-interval", "--checkpoint-activations"}  # of our models
    assert set(changes.FREE) - {*options.get_training_parser()._option_string_actions} <= own
