"""Decoder memories: equations and gradients, initial values, what each layer attends to.

Beams are proven in ``test_methods.py``, counts in ``test_counts.py``.
"""

import functools
import itertools

import pytest
import torch

from fairseq_deep.core.memories.layerwise import Layerwise, depth_aligned
from fairseq_deep.core.memories.msc import GruCell, Msc, MscMemory
from fairseq_deep.core.memories.transparent import Transparent
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.generation import strengthen
from tests.helpers.models import POSTNORM, PRENORM
from tests.helpers.tensors import DOUBLE, assert_same, randomise
from tests.reference import naive_memories
from tests.reference.naive_dlcl import layer_norm

T, B, C, L, M = 4, 2, 6, 6, 3
TRANSPARENT, LAYERWISE = {"decoder_memory": "transparent"}, {"decoder_memory": "layerwise"}
MSC = {"decoder_memory": "msc", "layer_agg": "msc"}
NEAR = {"rtol": 1e-6, "atol": 1e-6}


def stacks(layers=L, memories=M):
    encoder = Stack(layers, C, True, other_layers=memories)
    return encoder, Stack(memories, C, True, side="decoder", other_layers=layers)


def make_outputs(count=L + 1):
    return [torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(count)]


def pairs(norms):
    return [(norm.weight, norm.bias) for norm in norms]


def parameters_of(cell):
    return cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh


def assert_equal(actual, expected, sources):
    """All memories, and every gradient of *sources*."""
    actual, expected = torch.stack(actual), torch.stack(expected)
    assert_same(actual, expected, sources, **NEAR)


# --- transparent attention ---


def test_transparent_equals_the_equation_and_starts_with_means():
    memory, outputs = Transparent(*stacks(), dropout=0.3).double().train(), make_outputs()
    for z in memory(outputs, []):  # dropout of logits that are 0 does nothing
        torch.testing.assert_close(z, sum(outputs) / (L + 1))
    actual = randomise(memory).eval()(outputs, [])
    assert_equal(actual, naive_memories.transparent(outputs, memory.weight), [memory.weight, *outputs])
    rows = torch.stack([(weights.view(-1, 1, 1, 1) * torch.stack(outputs)).sum(0) for weights in memory.weights()])
    torch.testing.assert_close(rows, torch.stack(actual), rtol=1e-5, atol=1e-5)


def test_transparent_drops_logits_in_training_only():
    memory = Transparent(*stacks(memories=40), dropout=0.5).double()
    memory.weight.data.fill_(1.0)
    outputs = [torch.full((1, 1, C), float(k == 0), **DOUBLE) for k in range(L + 1)]
    assert {round(z[0, 0, 0].item(), 6) for z in memory.eval()(outputs, [])} == {round(1 / (L + 1), 6)}
    shares = torch.stack(memory.train()(outputs, []))[:, 0, 0, 0].tolist()
    # the first logit is 0 or 2, and so is each of the others: its share is a / (a + n e^2 + L - n) for some n
    possible = [a / (a + n * torch.e**2 + L - n) for a, n in itertools.product((1, torch.e**2), range(L + 1))]
    assert len({round(share, 6) for share in shares}) > 5
    assert all(min(abs(share - other) for other in possible) < 1e-9 for share in shares)


PLAIN = ["residual", "dlcl", "attention-residual", "hyper-connections", "residual-dual"]


@pytest.mark.parametrize("agg", PLAIN)
@pytest.mark.parametrize("name", [PRENORM, POSTNORM])
def test_a_large_logit_of_the_last_layer_gives_the_plain_model(name, agg, build, batch):
    plain, model = build(name, layer_agg=agg).eval(), build(name, layer_agg=agg, **TRANSPARENT).eval()
    weights = model.encoder.memory.weight
    model.load_state_dict({**plain.state_dict(), "encoder.memory.weight": weights})
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], atol=1e-2)
    weights.data[:, -1] = 1e3
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_and_sums_of_half_precision_are_of_fp32(dtype):
    memory = randomise(Transparent(*stacks(), dropout=0.0))
    exact = memory.weight.detach().clone()
    memory.to(dtype)
    assert torch.equal(memory.weight, exact) and memory.weight.dtype == torch.float32
    outputs = [torch.randn(T, B, C).to(dtype).requires_grad_() for _ in range(L + 1)]
    actual = memory(outputs, [])
    expected = naive_memories.transparent([output.detach().double() for output in outputs], exact.double())
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    # 60,000 in an entry, and 48 entries: the gradient of a logit is beyond what fp16 can hold
    sum((z.float() * 6e4).sum() for z in actual).backward()
    assert memory.weight.grad.dtype == torch.float32 and memory.weight.grad.isfinite().all()
    assert outputs[0].grad.dtype == dtype
    memory.double().to(dtype)
    assert memory.weight.dtype == memory.weight.grad.dtype == torch.float32


# --- layer-wise memories, and MSC ---


def test_layerwise_takes_the_layer_of_the_same_depth():
    assert [depth_aligned(j, 6, 12) for j in range(1, 7)] == [2, 4, 6, 8, 10, 12]
    assert [depth_aligned(j, 2, 5) for j in range(1, 3)] == [3, 5], "half is rounded up"
    for depth, count in itertools.product(range(1, 14), repeat=2):
        aligned = [depth_aligned(j, count, depth) for j in range(1, count + 1)]
        assert aligned == [naive_memories.nearest_layer(j, count, depth) for j in range(1, count + 1)]
    for layers, count in ((4, 4), (6, 3), (2, 5)):
        outputs = make_outputs(layers + 1)
        actual, expected = Layerwise(*stacks(layers, count))(outputs, []), naive_memories.layerwise(outputs, count)
        assert len(actual) == count and all(got is want for got, want in zip(actual, expected))


def test_the_cell_of_msc_is_torchs():
    seeded = []
    for kind in (GruCell(C), torch.nn.GRUCell(C, C)):
        torch.manual_seed(1)
        kind.reset_parameters()
        seeded.append(kind)
    cell, other = seeded
    for (name, got), (other_name, want) in zip(cell.named_parameters(), other.named_parameters()):
        assert name == other_name and torch.equal(got, want)
    x, h = torch.randn(2, T, B, C)
    torch.testing.assert_close(cell(x, h).flatten(0, 1), other(x.flatten(0, 1), h.flatten(0, 1)))


@pytest.mark.parametrize("blocks, memories", [(None, 3), (None, 6), (1, 1), (1, 2), (2, 3), (6, 2)])
def test_msc_equals_the_equation(blocks, memories):
    encoder, decoder = stacks(memories=memories)
    aggregator, memory = randomise(Msc(encoder, blocks).double()), randomise(MscMemory(encoder, decoder).double())
    layers, y_0 = make_layers(L, C), torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    state = aggregator.start(y_0)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
    norms = pairs(aggregator.context_norms), pairs(memory.memory_norms)
    top, expected = naive_memories.msc(y_0, layers, blocks or memories, parameters_of(aggregator.cell), *norms)
    sources = [y_0, *(parameter for part in (aggregator, memory, *layers) for parameter in part.parameters())]
    actual = memory([], state)
    assert len(actual) == memories
    torch.testing.assert_close(aggregator.finish(state), top, **NEAR)
    assert_equal(actual, expected, sources)  # what the decoder sees trains all


def test_msc_in_a_decoder_is_the_plain_stack():
    aggregator, layers, x = Msc(stacks()[1]), make_layers(L, C), torch.randn(T, B, C, **DOUBLE)
    assert not list(aggregator.parameters())
    assert torch.equal(run(aggregator, x, layers), functools.reduce(lambda x, layer: layer(x), layers, x))


# --- whole models ---

TWO = {"decoder_layer_agg": "lstm", "lstm_merge": "two", "lstm_share": "none", "decoder_ffn_embed_dim": 0}
MODELS = {
    "transparent": {**TRANSPARENT, "encoder_layers": 4, "decoder_layers": 3},
    "layerwise": {**LAYERWISE, "encoder_layers": 5, "decoder_layers": 3},
    "msc": {**MSC, "encoder_layers": 6, "decoder_layers": 3, "decoder_embed_dim": 24},
    "msc-blocks": {**MSC, "encoder_layers": 4, "decoder_layers": 3, "msc_blocks": 2},
    "msc-two": {"decoder_memory": "msc", "encoder_layer_agg": "msc", **TWO},
    "transparent-lstm": {**TRANSPARENT, "layer_agg": "lstm", "encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0},
    "transparent-merged": {**TRANSPARENT, "decoder_attn": "merged"},
    "transparent-dlcl": {**TRANSPARENT, "layer_agg": "dlcl"},
}


def naive_model_memories(encoder, source):
    """What each decoder layer should attend to, from the layers and parameters of *encoder*."""
    memory, aggregator, padding = encoder.memory, encoder.aggregator, source.eq(encoder.padding_idx)
    layers = [functools.partial(layer, encoder_padding_mask=padding) for layer in encoder.layers]
    outputs = encoder(source, (~padding).sum(1), return_all_hiddens=True)["encoder_states"]
    if isinstance(memory, MscMemory):
        norms = pairs(aggregator.context_norms), pairs(memory.memory_norms)
        return naive_memories.msc(
            outputs[0], layers, len(aggregator.context_norms), parameters_of(aggregator.cell), *norms
        )[1]
    outputs = [*outputs[:-1], run(aggregator, outputs[0], layers)]
    if isinstance(memory, Transparent):
        memories = naive_memories.transparent(outputs, memory.weight)
    else:
        memories = naive_memories.layerwise(outputs, memory.num_memories)
    norm = encoder.layer_norm
    return memories if norm is None else [layer_norm(z, norm.weight, norm.bias) for z in memories]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", [PRENORM, POSTNORM])
def test_each_decoder_layer_attends_to_its_memory(kind, name, build, batch):
    """The scores read nothing else of the encoder: the gradients of all its parameters equal the equations'."""
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
    assert all(z is seen[index - index % count] for index, z in enumerate(seen)) and len({id(z) for z in seen}) > 1
    assert_equal(seen[::count], naive_model_memories(model.encoder, source), list(model.encoder.parameters()))
