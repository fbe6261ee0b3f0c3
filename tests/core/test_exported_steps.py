"""``torch.export`` of encoders and decoding steps: one program for all positions and batches, equal to the eager model.

The methods are those of ``tests/helpers/methods.py``. Initialisations that only fill weights have no program of their
own.
"""

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
from tests.helpers.generation import prepare
from tests.helpers.methods import METHODS, OPTIONS, depths
from tests.helpers.models import make_batch

CAPACITY = 5
# what all axes have by default is in one of their cases
PLAIN = [f"{axis}-{default}" for axis, (_, default) in AXES.items() if axis != "layer_agg"]
DIFFERENT = [case for case in METHODS if case not in PLAIN]
ATTENTIONS = [case for case in METHODS if case.startswith("decoder_attn-")]
SOURCES = [case for case in METHODS if not case.startswith("decoder_attn-")]
SOURCES += [case for case in OPTIONS if "relative_values" in case or "rotary_positions" in case]




@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def quicker():
    """Dynamic sizes without a cache of torch whose keys cost more than what it saves."""
    with config.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.fixture
def make(build):
    """A model in which words, positions, sources and all parameters matter."""

    def make(case, **more):
        name, flags = {**METHODS, **OPTIONS}[case]
        model = build(name, **{**depths(name, flags), **flags, **more}).eval()
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape) + (0 if parameter.dim() > 1 else parameter))
        return model

    return make


def batches(dictionary, *sizes):
    return [make_batch(dictionary, lengths, lengths)[0] for lengths in sizes]


def near(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * (1 + float(want.abs().max())))


def decode(model, encode, step, source, beam, pads=False):
    """Compare *CAPACITY* steps of random words and orders with the model's own, and with whole sentences.

    With *pads*, the words of some hypotheses are padding, which whole sentences have at their end only.
    """
    sentences, hypotheses = len(source), len(source) * beam
    first = torch.arange(0, hypotheses, beam).unsqueeze(1)
    tensors, caches = encode(source)
    shared = model.encoder.reorder_encoder_out(model.encoder(source), torch.arange(sentences).repeat_interleave(beam))
    alone, state = model.encoder(source.repeat_interleave(beam, dim=0)), {}
    target = torch.zeros(hypotheses, 0, dtype=torch.long)
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
        if not pads:
            near(scores.flatten(0, 1), model.decoder(target, encoder_out=alone)[0][:, -1])
    assert scores.std() > 0.1, "words make a difference"


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_step_serves_all_positions_and_batches(case, make, dictionary, quicker):
    """Of all methods; batches of other sizes than the example, with and without padding."""
    model = make(case)
    encode, step = SourceProgram(model, 1, CAPACITY), export_decoding_step(model, 1, CAPACITY).module()
    for source in batches(dictionary, (5, 3, 4), (7,), (4, 4)):
        decode(model, encode, step, source, beam=1)


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, make, dictionary):
    """A beam in a batch of one size, which takes a third of the time to export."""
    decode_fixed(make(case), batches(dictionary, (5, 3))[0], beam=2)


def decode_fixed(model, source, beam):
    encode, words = SourceProgram(model, beam, CAPACITY), torch.zeros(len(source), beam, dtype=torch.long)
    example = (words, words.clone(), words[0, :1].clone(), *encode(source))
    step = export(StepProgram(model, beam, CAPACITY), example, strict=False).module()
    decode(model, encode, step, source, beam)


@pytest.mark.parametrize("case", ATTENTIONS)
def test_a_step_takes_over_hypotheses(case, make, dictionary, quicker):
    """Of all attentions, which are all that keep something of them."""
    model = make(case, encoder_layers=1, decoder_layers=1)
    encode, step = SourceProgram(model, 3, CAPACITY), export_decoding_step(model, 3, CAPACITY).module()
    for source, pads in zip(batches(dictionary, (5, 3, 4), (7,)), (False, True)):
        decode(model, encode, step, source, beam=3, pads=pads)


@pytest.mark.parametrize("case", ["decoder_attn-average", "decoder_attn-self"])
def test_caches_have_the_types_of_a_model_in_bf16(case, make, dictionary):
    model, source = make(case).bfloat16(), batches(dictionary, (5, 3))[0]
    encode, step = SourceProgram(model, 1, CAPACITY), StepProgram(model, 1, CAPACITY)
    (tensors, caches), words, state = encode(source), torch.full((2, 1), 5), {}
    scores, updated = step(words, torch.zeros_like(words), torch.tensor([0]), tensors, caches)
    expected = model.decoder(words, encoder_out=model.encoder(source), incremental_state=state)[0]
    torch.testing.assert_close(scores, expected)
    for name, module in model.decoder.named_modules():
        for field, kept in state.get(getattr(module, "_state", None), {}).items():
            if f"{name}.{field}" in updated:
                assert caches[f"{name}.{field}"].dtype == updated[f"{name}.{field}"].dtype == kept.dtype


def test_each_hypothesis_of_a_large_beam_has_its_own_keys(make, dictionary):
    model = make("layer_agg-residual", encoder_layers=1, decoder_layers=1)
    model.decoder.beam_state.largest_beam = 2
    decode_fixed(model, batches(dictionary, (5, 3))[0], beam=3)


@pytest.mark.parametrize("case", SOURCES)
def test_an_exported_encoder_makes_the_same(case, make, dictionary, quicker):
    """Of all methods, and with relative positions, for sources of any length."""
    model = make(case)
    program, encode = export_encoder(model, 2, CAPACITY).module(), SourceProgram(model, 2, CAPACITY)
    for source in batches(dictionary, (5, 3, 4), (9,), (2, 2)):
        for got, want in zip(program(source), encode(source)):
            assert got.keys() == want.keys()
            for name in want:
                near(got[name].nan_to_num(neginf=-1.0), want[name].nan_to_num(neginf=-1.0))


def test_programs_of_a_prepared_model_are_saved(make, dictionary, quicker):
    model, beam = make("layer_agg-dlcl", encoder_layers=1, decoder_layers=1), 2
    prepare(model)
    programs = []
    for exported in (export_encoder(model, beam, CAPACITY), export_decoding_step(model, beam, CAPACITY)):
        file = io.BytesIO()
        save(exported, file)
        programs.append(load(file).module())
    for source in batches(dictionary, (5, 3, 4), (7,)):
        decode(model, *programs, source, beam)


def test_more_positions_than_the_capacity_are_refused(make, dictionary, quicker):
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
