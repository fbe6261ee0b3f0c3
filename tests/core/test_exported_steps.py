"""``torch.export`` of encoders and decoding steps: one program for all positions and batches, equal to the eager model.

The methods are those of ``tests/helpers/methods.py``; initialisations that only fill weights have
no program of their own.
"""

import argparse
import copy
import io

import pytest
import torch
from torch._dynamo import config
from torch.export import export, load, save

from fairseq_deep.core.decoding.bfloat import BfloatLinear
from fairseq_deep.core.decoding.int8 import Int8Linear
from fairseq_deep.core.description import AXES
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.torch_export import SourceProgram, StepProgram, export_decoding_step, export_encoder
from tests.helpers.methods import DLCL, LALN, LALT, LSTM, METHODS, OPTIONS, POSTNORM, depths
from tests.helpers.models import make_batch
from tests.helpers.tensors import shake

CAPACITY = 5
CASES = {**METHODS, **OPTIONS}
# all modules with a state of hypotheses, and all ways to read positions and sources, several in a model
MIXED = {
    "relative positions, DLCL, a memory per layer": (DLCL, {"relative_positions": 2, "relative_values": True,
                                                            "decoder_memory": "transparent"}),
    "average, LSTM": (LSTM, {"decoder_attn": "average"}),
    "merged, languages": (POSTNORM, {"decoder_attn": "merged", **LALN, **LALT}),
}  # fmt: skip
CASES |= MIXED
DYNAMIC = [*MIXED, *(f"decoder_attn-{kind}" for kind in ("self", "merged-self", "ssru", "luna"))]
# with sizes that are fixed, an export takes a third of the time; every sixteenth by default, all at night
PLAIN = {f"{axis}-{default}" for axis, (_, default) in AXES.items() if axis != "layer_agg"}  # is in one of the others
FIXED = [pytest.param(case, marks=[] if number % 16 == 0 else [pytest.mark.nightly])
         for number, case in enumerate(case for case in CASES if case not in PLAIN)]  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients():
    """Also without a cache of torch whose keys cost more than what it saves."""
    with torch.no_grad(), config.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.fixture
def make(build):
    """make(case, **flags): a model in which words, positions, sources and all parameters matter."""

    def make(case, **more):
        name, flags = CASES[case]
        return shake(build(name, **{**depths(name, flags), **flags, **more}).eval(), 0.4, around=True)

    return make


def batches(dictionary, *sizes):
    return [make_batch(dictionary, lengths, lengths)[0] for lengths in sizes]


def near(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * (1 + float(want.abs().max())))


def decode(model, encode, step, source, beam, pads=False):
    """Compare *CAPACITY* steps of random words and orders with the model's own; with *pads*, some words are padding."""
    sentences, hypotheses = len(source), len(source) * beam
    first = torch.arange(0, hypotheses, beam).unsqueeze(1)
    tensors, caches = encode(source)
    shared = model.encoder.reorder_encoder_out(model.encoder(source), torch.arange(sentences).repeat_interleave(beam))
    target, state = torch.zeros(hypotheses, 0, dtype=torch.long), {}
    for position in range(CAPACITY):
        order, words = torch.randint(beam, (sentences, beam)), torch.randint(4, 40, (sentences, beam))
        if pads and position > 0:
            words[:, position % beam] = model.decoder.padding_idx
        given = (words, order, torch.tensor([position]), tensors, caches)
        copies = copy.deepcopy(given)
        scores, caches = step(*given)
        torch.testing.assert_close(given, copies, rtol=0, atol=0)  # which the step has not written to
        rows = (first + order).flatten()
        target = torch.cat([target[rows], words.view(-1, 1)], dim=1)
        model.decoder.reorder_incremental_state_scripting(state, rows)
        near(scores.flatten(0, 1), model.decoder(target, encoder_out=shared, incremental_state=state)[0][:, -1])
    assert scores.std() > 0.1, "words make a difference"


def stored(exported):
    """The program as it comes from a file."""
    file = io.BytesIO()
    save(exported, file)
    return load(file).module()


def assert_encoder(program, encode, sources):
    for source in sources:
        for got, want in zip(program(source), encode(source)):
            assert got.keys() == want.keys()
            for name in got:
                near(got[name].nan_to_num(neginf=-1.0), want[name].nan_to_num(neginf=-1.0))


@pytest.mark.parametrize("case", DYNAMIC)
def test_programs_serve_all_positions_and_batches(case, make, dictionary):
    """Batches of other sizes than the example, beams in new orders, with and without padding; stored, when prepared."""
    model, beam = make(case, encoder_layers=1, decoder_layers=1), 3
    model.prepare_for_inference_(argparse.Namespace(generation=argparse.Namespace()))
    encode, sources = SourceProgram(model, beam, CAPACITY), batches(dictionary, (5, 3, 4), (7,), (4, 4))
    assert_encoder(stored(export_encoder(model, beam, CAPACITY)), encode, sources)
    step = stored(export_decoding_step(model, beam, CAPACITY))
    for source, pads in zip(sources, (False, case.startswith("decoder_attn-"), False)):
        decode(model, encode, step, source, beam, pads)


@pytest.mark.parametrize("case", FIXED)
def test_programs_of_one_batch(case, make, dictionary):
    decode_fixed(make(case), batches(dictionary, (5, 3))[0], beam=2)


def decode_fixed(model, source, beam):
    encode, words = SourceProgram(model, beam, CAPACITY), torch.zeros(len(source), beam, dtype=torch.long)
    assert_encoder(export(encode, (source,), strict=False).module(), encode, [source])
    example = (words, words.clone(), words[0, :1].clone(), *encode(source))
    step = export(StepProgram(model, beam, CAPACITY), example, strict=False).module()
    decode(model, encode, step, source, beam)


def test_each_hypothesis_of_a_large_beam_has_its_own_keys(make, dictionary):
    model = make("layer_agg-residual", encoder_layers=1, decoder_layers=1)
    model.decoder.beam_state.largest_beam = 2
    decode_fixed(model, batches(dictionary, (5, 3))[0], beam=3)


def test_more_positions_than_the_capacity_are_refused(make, dictionary):
    model = make("layer_agg-residual", encoder_layers=1, decoder_layers=1)
    source, caches = SourceProgram(model, 1, CAPACITY)(batches(dictionary, (5, 3))[0])
    step, words = export_decoding_step(model, 1, CAPACITY).module(), torch.full((2, 1), 5)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        step(words, torch.zeros_like(words), torch.tensor([CAPACITY]), source, caches)


@pytest.mark.parametrize("capacity", [0, 1025])
@pytest.mark.parametrize("exporter", [export_encoder, export_decoding_step])
def test_a_capacity_that_the_model_does_not_have_is_refused(exporter, capacity, make):
    with pytest.raises(UsageError, match=f"a capacity of {capacity} positions: choose 1 to 1024"):
        exporter(make("layer_agg-residual"), 1, capacity)


@pytest.mark.parametrize("kind", [BfloatLinear, Int8Linear])
def test_reduced_precision_cannot_be_exported(kind, make):
    """Its products hold weights in the form of this machine, which no file can hold."""
    model = make("layer_agg-residual")
    model.decoder.layers[0].fc1 = kind(model.decoder.layers[0].fc1)
    with pytest.raises(UsageError, match="export the model before reduce_precision"):
        export_decoding_step(model)
