"""What the tests share: a small vocabulary, small models of every architecture, small batches."""

import gc
import logging

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.attention import SharedBeamState
from fairseq_deep.core.attention.beam_reorder import read_order
from fairseq_deep.plugin.architectures import ARCHITECTURES, build_architecture

VOCAB = 40


def tiny_flags(name, dim=16):
    """Flags that make the architecture *name* narrow, with *dim* features; its depth and structure stay."""
    flags = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    row = ARCHITECTURES[name]
    for side, width in (("encoder", dim), ("decoder", dim * 3 // 2 if row.encoder_size else dim)):
        flags.update({f"{side}_embed_dim": width, f"{side}_attention_heads": 2})
        if AGGREGATORS.get(row.layer_agg).layout(side, dict(row.options)).feed_forward:
            flags[f"{side}_ffn_embed_dim"] = 2 * dim
    return flags


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


LEVELS = {logger: logger.level for logger in map(logging.getLogger, ("fairseq", "fairseq_deep"))}


@pytest.fixture(autouse=True)
def log_levels():
    """The tools make loggers quieter, also where fixtures of a whole file call them; no test is to notice."""
    for logger, level in LEVELS.items():
        logger.setLevel(level)


@pytest.fixture(scope="session")
def dictionary():
    symbols = Dictionary()
    for index in range(VOCAB - len(symbols)):
        symbols.add_symbol(f"w{index}")
    return symbols


@pytest.fixture
def build(dictionary):
    """build(name, dim=16, **flags): a narrow model of the architecture *name* without dropout."""

    def build(name, dim=16, **flags):
        return build_architecture(name, dictionary, **{**tiny_flags(name, dim), **flags})

    return build


def make_batch(dictionary, lengths=(5, 7, 3), target_lengths=(4, 6, 6), left_pad=True):
    """Random sentence pairs: source (padded on the left unless told otherwise), its lengths, target input."""
    longest = max(lengths)
    source = torch.full((len(lengths), longest), dictionary.pad())
    for row, length in enumerate(lengths):
        words = torch.randint(dictionary.nspecial, len(dictionary), (length,))
        source[row, longest - length if left_pad else 0 :][:length] = words
    target = torch.full((len(target_lengths), max(target_lengths)), dictionary.pad())
    for row, length in enumerate(target_lengths):
        target[row, 0] = dictionary.eos()
        target[row, 1:length] = torch.randint(dictionary.nspecial, len(dictionary), (length - 1,))
    return source, torch.tensor(lengths), target


@pytest.fixture
def batch(dictionary):
    return make_batch(dictionary)


def reorder_all(module, state, order):
    """What the decoder does when beam search asks for a new order."""
    parts = list(module.modules())
    beam_state = [part for part in parts if isinstance(part, SharedBeamState)]
    decided = beam_state[0].reorder(state, order) if beam_state else read_order(order, len(order), 1)
    for part in parts:
        if hasattr(part, "reorder") and part not in beam_state and decided is not None:
            part.reorder(state, decided)


def pytest_collection_finish():
    """What collection leaves is there until the end: looking through it again and again takes a twentieth of all."""
    gc.collect()
    gc.freeze()
