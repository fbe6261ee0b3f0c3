"""Every method, with 6 + 6 layers, learns in a few updates to use its source, and not only to write likely targets.

The task is to copy a random string. A model that cannot see the source cannot do better than ``BLIND`` on it, and a
model that does not use the source loses nothing where it is given that of another sentence.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.plugin.training.adam import FusedAdam
from tests.helpers.methods import methods
from tests.helpers.models import make_dictionary

METHODS = dict(methods(inits=True))
SYMBOLS, LENGTH = 8, 3
BLIND = LENGTH * math.log(SYMBOLS) / (LENGTH + 1)  # nats per token; the end of a sentence is certain
WARMUP = 20
UPDATES = 120  # four times what a plain pre-norm stack takes, of 6 + 6 as of 12 + 12 layers
# BranchNorm opens its branches while the learning rate rises, and ProRes those of all layers in about that time
SCHEDULES = {"residual-branchnorm": {"branchnorm_updates": WARMUP}, "residual-prores": {"prores_period": 2}}


@pytest.fixture(scope="module")
def dictionary():
    return make_dictionary(4 + SYMBOLS)  # four are special


def copies(dictionary, size):
    """*size* random strings, and the words before theirs."""
    words = dictionary.nspecial + torch.randint(SYMBOLS, (size, LENGTH))
    end = torch.full((size, 1), dictionary.eos())
    return torch.cat([words, end], 1), torch.cat([end, words], 1)


def loss_of(model, source, target, before):
    """In nats per token."""
    scores = model(source, torch.full((len(source),), LENGTH + 1), before)[0]
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


# their residual branches are small at the start, and they need at least four times the updates of plain pre-norm
SLOW = ("residual-b2t", "residual-layerscale")
SAMPLE = ("layer_agg-dlcl", "layer_agg-lstm")  # papers' main methods; all others are for the night


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly])
                                  for name in METHODS if name not in SLOW])  # fmt: skip
def test_the_source_is_used(name, build, dictionary):
    """The loss on new strings is below BLIND, and much higher with the sources of others."""
    (arch, flags), depth = METHODS[name], {"encoder_layers": 6, "decoder_layers": 6}
    model = build(arch, dim=32, share_all_embeddings=True, **depth, **flags, **SCHEDULES.get(name, {}))
    adam = FusedAdam(model.parameters(), betas=(0.9, 0.98))
    for update in range(UPDATES):
        adam.param_groups[0]["lr"] = 2e-3 * min(1, (update + 1) / WARMUP)
        model.train().set_num_updates(update)
        adam.zero_grad()
        target, before = copies(dictionary, 32)
        loss_of(model, target, target, before).backward()
        adam.step()
        if update % 10 == 9:
            target, before = copies(dictionary, 64)
            with torch.no_grad():
                own, other = (loss_of(model.eval(), each, target, before) for each in (target, target.roll(1, 0)))
            if own < BLIND and other > own + 0.75:
                return
    pytest.fail(f"loss {own:.2f} (without the source {BLIND:.2f}), with the source of another {other:.2f}")
