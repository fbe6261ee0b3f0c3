"""Which two commands train the same."""

import shlex

import pytest

from fairseq_deep.recipes import changes, record

BASE = "fairseq-train DATA --arch a --lr 0.1 --adam-betas '(0.9, 0.98)' --fp16 --clip-norm -1 --max-epoch 3"


@pytest.fixture
def settings():
    return changes


def words(text):
    return shlex.split(text)


@pytest.mark.parametrize("other", [
    BASE, BASE.replace("DATA", "ELSEWHERE"), BASE.replace("--max-epoch 3", "--max-epoch 9 --max-update 7"),
    BASE.replace("--lr 0.1", "--lr 0.5 --lr=0.1"), f"{BASE} --num-workers 4 --save-interval-updates 3",
    BASE.replace("--arch a --lr 0.1", "--lr 0.1 --arch a"),
])  # fmt: skip
def test_the_same_training(settings, other):
    assert settings.difference(words(BASE), words(other)) == ""


@pytest.mark.parametrize("other, named", [
    (f"{BASE} --lr 0.2", "--lr 0.1, now --lr 0.2"), (f"{BASE} --seed 7", "without --seed, now --seed 7"),
    (BASE.replace("--fp16", ""), "--fp16, now without --fp16"), (f"{BASE} --lr=0.2", "--lr 0.1, now --lr 0.2"),
    (BASE.replace("-1", "-2"), "--clip-norm -1, now --clip-norm -2"),
    (BASE.replace("0.98", "0.99"), "--adam-betas (0.9, 0.98), now --adam-betas (0.9, 0.99)"),
    (f"{BASE} --lr-scheduler inverse_sqrt_cooldown --max-update 7",
     "without --lr-scheduler, now --lr-scheduler inverse_sqrt_cooldown; without --max-update, now --max-update 7"),
    (f"{BASE} --lr 0.2 --arch b", "--arch a, now --arch b; --lr 0.1, now --lr 0.2"),
])  # fmt: skip
def test_another_training(settings, other, named):
    assert settings.difference(words(BASE), words(other)) == named


def test_flags_that_do_not_count_are_fairseqs(settings):
    """A misspelt one would let nothing through that it should, and nobody would see it."""
    import logging

    logging.disable(logging.CRITICAL)
    from fairseq import options

    parser = options.get_training_parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    own = {"--compile", "--log-depth-interval", "--checkpoint-activations"}  # of our models
    logging.disable(logging.NOTSET)
    assert set(settings.FREE) - known <= own


def test_no_command_is_no_training(settings, tmp_path):
    assert settings.read_command(str(tmp_path / "none")) == []


def test_only_measured_scores_are_recorded():
    """Many language pairs have BLEU alone; a missing score is not 0."""
    found = record.measures({"sacrebleu": {"bleu": 20.004, "signature": "s"}, "tokenised": {}, "compound_split": {}})
    assert found == {"bleu": 20.0, "signature": "s"}
