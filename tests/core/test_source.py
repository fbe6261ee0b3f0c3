"""Every method, with 6 + 6 layers, learns in a few updates to use its source, and not only to write likely targets.

The task is to copy a random string. A model that cannot see the source cannot do better than ``BLIND`` on it, and a
model that does not use the source loses nothing where it is given that of another sentence.
"""

import math
import types

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_deep.plugin.training.adam import FusedAdam
from tests.helpers.methods import FORMS
from tests.helpers.models import make_dictionary

SYMBOLS, LENGTH = 8, 3
BLIND = LENGTH * math.log(SYMBOLS) / (LENGTH + 1)  # nats per token; the end of a sentence is certain
WARMUP, STEP = 20, 10
UPDATES = 120  # four times what a plain pre-norm stack takes, of 6 + 6 as of 12 + 12 layers
# BranchNorm opens its branches while the learning rate rises, and ProRes those of all layers in about that time
SCHEDULES = {"branchnorm": {"branchnorm_updates": WARMUP}, "prores": {"prores_period": 2}}


@pytest.fixture(scope="module")
def dictionary():
    return make_dictionary(4 + SYMBOLS)  # four are special


def copies(dictionary, size):
    """*size* random strings, as source and as target."""
    words = dictionary.nspecial + torch.randint(SYMBOLS, (size, LENGTH))
    end = torch.full((size, 1), dictionary.eos())
    source, before = torch.cat([words, end], 1), torch.cat([end, words], 1)
    inputs = {"src_tokens": source, "src_lengths": torch.full((size,), LENGTH + 1), "prev_output_tokens": before}
    return {"net_input": inputs, "target": source, "ntokens": source.numel()}


@pytest.fixture
def train(build, dictionary):
    """train(name, layers, updates, blind=False, **flags): whether it uses its source, at the latest after *updates*.

    That is, whether the loss on new sentences is below BLIND, and much higher with the source of another sentence.
    """
    criterion = CrossEntropyCriterion(types.SimpleNamespace(target_dictionary=dictionary), sentence_avg=False)

    def loss_of(model, batch):
        """In nats per token."""
        return criterion(model, batch)[0] / batch["ntokens"]

    def train(name, layers, updates, blind=False, **flags):
        depth = {"encoder_layers": layers, "decoder_layers": layers}
        model = build(name, dim=32, share_all_embeddings=True, **depth, **flags)
        if blind:
            model.encoder.register_forward_hook(
                lambda encoder, inputs, out: {**out, "encoder_out": [0 * x for x in out["encoder_out"]]}
            )
        adam = FusedAdam(model.train().parameters(), betas=(0.9, 0.98))
        for update in range(updates):
            adam.param_groups[0]["lr"] = 2e-3 * min(1, (update + 1) / WARMUP)
            model.set_num_updates(update)
            adam.zero_grad()
            loss_of(model, copies(dictionary, 32)).backward()
            adam.step()
            if (update + 1) % STEP == 0:
                batch, found = copies(dictionary, 64), []
                with torch.no_grad():
                    for _ in range(2):
                        found.append(loss_of(model.eval(), batch).item())
                        batch["net_input"]["src_tokens"] = batch["net_input"]["src_tokens"].roll(1, 0)
                if found[0] < BLIND and found[1] > found[0] + 0.75:
                    return True
                model.train()
        print(f"{updates} updates: loss {found[0]:.2f} (without the source {BLIND:.2f}), of another {found[1]:.2f}")
        return False

    return train


# branches that start small beside their residual stream: they take four times the updates of plain pre-norm, or more
SLOW = ("b2t", "layerscale", "dense_sum")
SAMPLE = ("dlcl", "lstm")  # papers' main methods; all others are for the night


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly])
                                  for name in FORMS if name not in SLOW])  # fmt: skip
def test_the_source_is_used(name, train):
    arch, flags = FORMS[name]
    assert train(arch, 6, UPDATES, **flags, **SCHEDULES.get(name, {}))


def test_a_decoder_that_cannot_see_the_source_is_found_out(train):
    assert not train("transformer_lstm_2l2l_tiny", 6, 2 * STEP, blind=True)


@pytest.mark.nightly
def test_without_a_forget_bias_a_deep_lstm_does_not_learn_to_use_the_source(train):
    """Why it has one: of gates near 0.5, little of a token is left after 12 layers."""
    assert not train("transformer_lstm_12l12l", 12, 60, lstm_forget_bias=0.0)
