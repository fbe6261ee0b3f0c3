"""``--lr-scheduler inverse_sqrt_cooldown``: its rates by hand."""

import logging
from math import sqrt

import pytest
import torch
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.schedule import CooldownConfig, InverseSqrtCooldown


def scheduler(**settings):
    settings = {"lr": [0.8], "warmup_updates": 4, "max_update": 36, "cooldown_updates": 20, **settings}
    config = FairseqAdamConfig(lr=settings["lr"], adam_betas="(0.9, 0.98)")
    optimizer = FairseqAdam(config, [torch.nn.Parameter(torch.zeros(1))])
    return InverseSqrtCooldown(CooldownConfig(**settings), optimizer)


INVERSE = {0: 0, 1: 0.2, 3: 0.6, 4: 0.8, 9: 0.8 * 2 / 3, 16: 0.4, 17: 0.38, 26: 0.2, 35: 0.02, 36: 0, 40: 0}
CONSTANT = {0: 0, 1: 0.2, 3: 0.6, 4: 0.8, 9: 0.8, 16: 0.8, 17: 0.76, 26: 0.4, 35: 0.04, 36: 0, 40: 0}


@pytest.mark.parametrize("before, rates", [("inverse_sqrt", INVERSE), ("constant", CONSTANT)])
def test_rates_by_hand(before, rates):
    schedule = scheduler(lr_before_cooldown=before)
    assert schedule.optimizer.get_lr() == 0
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == schedule.optimizer.get_lr() == pytest.approx(rate, abs=1e-15)


def test_defaults_and_other_starts():
    with pytest.raises(UsageError, match="--lr with one rate per epoch is not supported"):
        scheduler(lr=[0.1, 0.2])
    schedule = scheduler(cooldown_updates=None, max_update=100, warmup_init_lr=0.1)
    assert schedule.cooldown == 20 and schedule.rate(0) == 0.1 and schedule.rate(2) == pytest.approx(0.45)
    assert schedule.rate(90) == pytest.approx(schedule.rate(80) / 2) == pytest.approx(0.8 * sqrt(4 / 80) / 2)
    whole = scheduler(cooldown_updates=32)  # nothing between warm-up and cooldown
    assert [whole.rate(updates) for updates in (4, 20, 36)] == pytest.approx([0.8, 0.4, 0])
    none = scheduler(warmup_updates=0, lr_before_cooldown="constant")
    assert [none.rate(updates) for updates in (0, 16, 26)] == pytest.approx([0.8, 0.8, 0.4])


def test_another_end_is_said(caplog):
    state = scheduler().state_dict()
    with caplog.at_level(logging.WARNING):
        scheduler().load_state_dict(state)
        scheduler().load_state_dict({"best": 2.0})  # of another scheduler
        assert caplog.text == ""
        scheduler(max_update=72).load_state_dict(state)
    assert "--max-update 36 and --cooldown-updates 20; from here on they are 72 and 20" in caplog.text
