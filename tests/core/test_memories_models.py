"""Whole models with decoder memories: what each layer attends to, the invariances of all models, beam search."""

import functools

import pytest
import torch
from fairseq import search

from fairseq_deep.core.inits import INITS
from fairseq_deep.core.memories.msc import MscMemory
from fairseq_deep.core.memories.transparent import Transparent
from fairseq_deep.core.registry import UsageError
from tests.helpers.generation import assert_lively, assert_same, generate, make_sample, prepare, strengthen
from tests.helpers.invariances import INVARIANCES
from tests.helpers.memories import (
    ENCODER_MSC,
    LAYERWISE,
    MSC,
    TRANSPARENT,
    assert_gradients_equal,
    pairs,
    parameters_of,
)
from tests.helpers.models import POSTNORM, PRENORM, make_batch
from tests.helpers.tensors import randomise
from tests.reference import naive_memories
from tests.reference.naive_dlcl import layer_norm

TWO = {"decoder_layer_agg": "lstm", "lstm_merge": "two", "lstm_share": "none", "decoder_ffn_embed_dim": 0}
LSTM = {"layer_agg": "lstm", "encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}
MEMORY_FLAGS = {"transparent": TRANSPARENT, "layerwise": LAYERWISE, "msc": MSC}
MODELS = {
    **MEMORY_FLAGS,
    "transparent-deep": {**TRANSPARENT, "encoder_layers": 4, "decoder_layers": 3},
    "layerwise-deep": {**LAYERWISE, "encoder_layers": 5, "decoder_layers": 3},
    "msc-deep": {**MSC, "encoder_layers": 6, "decoder_layers": 3},
    "msc-blocks": {**MSC, "encoder_layers": 4, "decoder_layers": 3, "msc_blocks": 2},
    "transparent-two": {**TRANSPARENT, **TWO},
    "layerwise-two": {**LAYERWISE, **TWO},
    "msc-widths": {**MSC, "decoder_embed_dim": 24},
    "msc-two": {**ENCODER_MSC, **TWO},
    "transparent-lstm": {**TRANSPARENT, **LSTM, "lstm_forget_bias": 3.0},  # else there are two lengths alone
    "transparent-merged": {**TRANSPARENT, "decoder_attn": "merged"},
    "msc-merged": {**MSC, "decoder_attn": "merged"},
    "msc-dlcl": {**ENCODER_MSC, "decoder_layer_agg": "dlcl"},
    "layerwise-dlcl": {**LAYERWISE, "layer_agg": "dlcl"},
    "transparent-dlcl": {**TRANSPARENT, "layer_agg": "dlcl"},
}
every_model = pytest.mark.parametrize("kind", MODELS)
both_norms = pytest.mark.parametrize("name", [PRENORM, POSTNORM])


def naive_model_memories(encoder, source):
    """What each decoder layer should attend to, from the layers and parameters of *encoder*."""
    encoded = encoder(source, source.ne(encoder.padding_idx).sum(1), return_all_hiddens=True)
    outputs, padding = encoded["encoder_states"], source.eq(encoder.padding_idx)
    memory = encoder.memory
    if isinstance(memory, MscMemory):
        layers = [functools.partial(layer, encoder_padding_mask=padding) for layer in encoder.layers]
        aggregator = encoder.aggregator
        norms = pairs(aggregator.context_norms), pairs(memory.memory_norms)
        blocks = len(aggregator.context_norms)
        return naive_memories.msc(outputs[0], layers, blocks, parameters_of(aggregator.cell), *norms)[1]
    outputs = [*outputs[:-1], encoder.aggregator.finish(final_state(encoder, outputs[0], padding))]
    if isinstance(memory, Transparent):
        memories = naive_memories.transparent(outputs, memory.weight)
    else:
        memories = naive_memories.layerwise(outputs, memory.num_memories)
    if encoder.layer_norm is None:
        return memories
    return [layer_norm(z, encoder.layer_norm.weight, encoder.layer_norm.bias) for z in memories]


def final_state(encoder, x, padding):
    state = encoder.aggregator.start(x)
    for index, layer in enumerate(encoder.layers):
        state = encoder.aggregator.write(state, index, layer(encoder.aggregator.read(state, index), padding))
    return state


@every_model
@both_norms
def test_each_decoder_layer_attends_to_its_memory(kind, name, build, batch):
    """And nothing else of the encoder is in the scores: all its parameters' gradients are those of the equations."""
    model = build(name, **MODELS[kind]).double().eval()
    for part in (model.encoder, model.decoder.layers):
        strengthen(part)
    randomise(model.encoder.memory)
    source, lengths, target = batch
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].memory))
    model(source, lengths, target)
    count = model.decoder.modules_per_layer
    assert len(seen) == len(model.decoder.layers) == model.encoder.memory.num_memories * count
    assert all(z is seen[index - index % count] for index, z in enumerate(seen))
    assert len({id(z) for z in seen}) > 1
    expected = naive_model_memories(model.encoder, source)
    assert_gradients_equal(seen[::count], expected, list(model.encoder.parameters()))


@pytest.mark.parametrize("check", INVARIANCES)
@every_model
def test_invariances(kind, check, build, dictionary):
    name = POSTNORM if kind.endswith("deep") else PRENORM
    INVARIANCES[check](lambda **flags: build(name, **{**MODELS[kind], **flags}), dictionary)


@pytest.mark.parametrize("init", INITS.names())
@pytest.mark.parametrize("kind", MEMORY_FLAGS)
@both_norms
def test_every_init_works_or_is_refused(name, kind, init, build, batch):
    """And leaves the start of what the memory has as it is."""
    torch.manual_seed(3)
    untouched = build(name, **MEMORY_FLAGS[kind]).encoder
    torch.manual_seed(3)
    try:
        model = build(name, deep_init=init, **MEMORY_FLAGS[kind]).train()
    except UsageError as error:
        cures = ("use --encoder-layer-agg residual, not msc", "use a transformer_postnorm architecture")
        assert any(cure in str(error) for cure in cures)
        return
    for part in ("memory", "aggregator"):
        ours, other = getattr(model.encoder, part).state_dict(), getattr(untouched, part).state_dict()
        assert ours.keys() == other.keys()
        for key, value in ours.items():
            assert value.std() == 0 or value.abs().max() == pytest.approx(other[key].abs().max().item(), rel=0.05)
    model(*batch)[0].log_softmax(-1)[..., 7].sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", MEMORY_FLAGS)
def test_memories_follow_their_sentences(kind, build, dictionary):
    """Whether a beam shares its source, or an order tears hypotheses of a sentence apart."""
    model = build(PRENORM, **MEMORY_FLAGS[kind]).eval()
    source, lengths, _ = make_batch(dictionary)
    encoder, beams = model.encoder, torch.tensor([0, 0, 1, 1, 2, 2])
    encoded = encoder(source, lengths)
    shared = encoder.reorder_encoder_out(encoded, beams)
    assert all(got is want for got, want in zip(shared["encoder_memories"], encoded["encoder_memories"]))
    encoder.shares_sources = False
    copied = encoder.reorder_encoder_out(encoded, beams)
    encoder.shares_sources = True
    for result, rows in (
        (copied, beams),
        (encoder.reorder_encoder_out(encoded, torch.tensor([2, 0])), torch.tensor([2, 0])),
        (encoder.reorder_encoder_out(shared, torch.tensor([5, 4, 0, 0])), torch.tensor([2, 0])),
        (encoder.reorder_encoder_out(shared, torch.tensor([3, 0, 5])), torch.tensor([1, 0, 2])),
    ):
        expected = encoder(source[rows], lengths[rows])["encoder_memories"]
        assert len(result["encoder_memories"]) == len(expected) == 2
        for got, want in zip(result["encoder_memories"], expected):
            torch.testing.assert_close(got, want)


# --- translation ---


@every_model
def test_beam_search_equals_a_forward_with_repeated_sources(kind, build, dictionary):
    """fairseq's generator without caches, with a source for each hypothesis, is the reference."""
    model = build(PRENORM, **MODELS[kind]).eval()
    strengthen(model.decoder.layers)
    randomise(model.encoder.memory)
    sample = make_sample(dictionary)
    model.encoder.shares_sources = False
    expected = generate(model, dictionary, sample, incremental=False)
    assert_lively(expected)
    model.encoder.shares_sources = True
    assert_same(generate(model, dictionary, sample), expected)
    prepare(model)
    assert_same(generate(model, dictionary, sample), expected, attention=False)


@pytest.mark.parametrize("kind", MEMORY_FLAGS)
def test_scores_of_hypotheses_are_those_of_the_model(kind, build, dictionary):
    model, sample = build(POSTNORM, **MEMORY_FLAGS[kind]).eval(), make_sample(dictionary)
    strengthen(model)
    with torch.no_grad():
        found = generate(model, dictionary, sample, strategy=search.BeamSearch)
        for source, sentence in zip(sample["net_input"]["src_tokens"], found):
            for hypothesis in sentence:
                words = hypothesis["tokens"]
                before = torch.cat([torch.tensor([dictionary.eos()]), words[:-1]])
                length = source.ne(dictionary.pad()).sum().view(1)
                scores = model(source[None], length, before[None])[0].log_softmax(-1)[0]
                got = scores.gather(1, words[:, None])[:, 0]
                torch.testing.assert_close(got, hypothesis["positional_scores"], rtol=1e-4, atol=1e-4)


def test_an_ensemble_of_models_with_and_without_memories(build, dictionary):
    models = [build(PRENORM, **flags).eval() for flags in (TRANSPARENT, {}, MSC)]
    sample = make_sample(dictionary)
    for model in models:
        strengthen(model.decoder.layers)
        model.encoder.shares_sources = False
    expected = generate(models, dictionary, sample, incremental=False)
    for model in models:
        model.encoder.shares_sources = True
    assert_same(generate(models, dictionary, sample), expected)
