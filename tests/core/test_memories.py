"""Decoder memories against their equations: values, every gradient, start values, counts, what is refused."""

import itertools

import pytest
import torch

from fairseq_deep.core.memories import MEMORIES
from fairseq_deep.core.memories.layerwise import Layerwise, depth_aligned
from fairseq_deep.core.memories.msc import GruCell, Msc, MscMemory
from fairseq_deep.core.memories.transparent import Transparent
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.memories import (
    ENCODER_MSC,
    LAYERWISE,
    MSC,
    TRANSPARENT,
    assert_gradients_equal,
    pairs,
    parameters_of,
)
from tests.helpers.models import POSTNORM, PRENORM, full_size, size_of
from tests.helpers.tensors import randomise
from tests.reference import naive_memories

T, B, C, L, M = 4, 2, 6, 6, 3


def stacks(layers=L, memories=M, pre_norm=True):
    encoder = Stack(layers, C, pre_norm, other_layers=memories)
    return encoder, Stack(memories, C, pre_norm, side="decoder", other_layers=layers)


def make_outputs(count=L + 1):
    return [torch.randn(T, B, C, dtype=torch.float64, requires_grad=True) for _ in range(count)]


# --- transparent attention ---


def test_transparent_equals_the_equation():
    memory, outputs = randomise(Transparent(*stacks(), dropout=0.3).double()).eval(), make_outputs()
    actual = memory(outputs, [])
    assert_gradients_equal(actual, naive_memories.transparent(outputs, memory.weight), [memory.weight, *outputs])
    rows = torch.stack([(weights.view(-1, 1, 1, 1) * torch.stack(outputs)).sum(0) for weights in memory.weights()])
    torch.testing.assert_close(rows, torch.stack(actual), rtol=1e-5, atol=1e-5)


def test_transparent_starts_with_means():
    memory, outputs = Transparent(*stacks()).double().train(), make_outputs()
    for z in memory(outputs, []):  # dropout of logits that are 0 does nothing
        torch.testing.assert_close(z, sum(outputs) / (L + 1))


def test_transparent_drops_logits_in_training_only():
    memory = Transparent(*stacks(memories=40), dropout=0.5).double()
    with torch.no_grad():
        memory.weight.fill_(1.0)
    outputs = [torch.full((1, 1, C), float(k == 0), dtype=torch.float64) for k in range(L + 1)]
    assert {round(z[0, 0, 0].item(), 6) for z in memory.eval()(outputs, [])} == {round(1 / (L + 1), 6)}
    shares = torch.stack(memory.train()(outputs, []))[:, 0, 0, 0].tolist()
    # the first logit is 0 or 2, and so is each of the others: its share is a / (a + n e^2 + L - n) for some n
    possible = [a / (a + n * torch.e**2 + L - n) for a, n in itertools.product((1, torch.e**2), range(L + 1))]
    assert len({round(share, 6) for share in shares}) > 5
    assert all(min(abs(share - other) for other in possible) < 1e-9 for share in shares)


@pytest.mark.parametrize("agg", ["residual", "dlcl"])
@pytest.mark.parametrize("name", [PRENORM, POSTNORM])
def test_a_large_logit_of_the_last_layer_gives_the_plain_model(name, agg, build, batch):
    plain, model = build(name, layer_agg=agg).eval(), build(name, layer_agg=agg, **TRANSPARENT).eval()
    weights = model.encoder.memory.weight
    assert weights.shape == (2, 3) and not weights.any()
    model.load_state_dict({**plain.state_dict(), "encoder.memory.weight": weights})
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], atol=1e-2)
    with torch.no_grad():
        weights[:, -1] = 1e3
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])
    assert (model.encoder(*batch[:2])["encoder_out"][0] - plain.encoder(*batch[:2])["encoder_out"][0]).abs().max() == 0


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
        assert got.dtype == dtype
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    # 60,000 in an entry, and 48 entries: the gradient of a logit is beyond what fp16 can hold
    sum((z.float() * 6e4).sum() for z in actual).backward()
    assert memory.weight.grad.dtype == torch.float32 and memory.weight.grad.isfinite().all()
    assert outputs[0].grad.dtype == dtype
    memory.double().to(dtype)
    assert memory.weight.dtype == memory.weight.grad.dtype == torch.float32


# --- layer-wise memories ---


def test_layerwise_takes_the_layer_of_the_same_depth():
    assert [depth_aligned(j, 6, 6) for j in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert [depth_aligned(j, 6, 12) for j in range(1, 7)] == [2, 4, 6, 8, 10, 12]
    assert [depth_aligned(j, 6, 2) for j in range(1, 7)] == [1, 1, 1, 1, 2, 2]
    assert [depth_aligned(j, 2, 5) for j in range(1, 3)] == [3, 5], "half is rounded up"
    for depth, count in itertools.product(range(1, 14), repeat=2):
        aligned = [depth_aligned(j, count, depth) for j in range(1, count + 1)]
        assert aligned == [naive_memories.nearest_layer(j, count, depth) for j in range(1, count + 1)]
        assert min(aligned) >= 1 and aligned[-1] == depth and aligned == sorted(aligned)


@pytest.mark.parametrize("layers, memories", [(4, 4), (6, 3), (2, 5), (7, 3)])
def test_layerwise_equals_the_equation(layers, memories):
    memory, outputs = Layerwise(*stacks(layers, memories)), make_outputs(layers + 1)
    assert not list(memory.parameters())
    actual, expected = memory(outputs, []), naive_memories.layerwise(outputs, memories)
    assert len(actual) == memories
    assert all(got is want for got, want in zip(actual, expected))


# --- MSC ---


def test_the_cell_is_torchs():
    torch.manual_seed(1)
    cell = GruCell(C)
    torch.manual_seed(1)
    other = torch.nn.GRUCell(C, C)
    for (name, got), (other_name, want) in zip(cell.named_parameters(), other.named_parameters()):
        assert name == other_name and torch.equal(got, want)
    assert sum(parameter.numel() for parameter in cell.parameters()) == 6 * C * C + 6 * C
    x, h = torch.randn(T, B, C), torch.randn(T, B, C)
    torch.testing.assert_close(cell(x, h).flatten(0, 1), other(x.flatten(0, 1), h.flatten(0, 1)))


@pytest.mark.parametrize("blocks, memories", [(None, 3), (None, 6), (1, 1), (1, 2), (2, 3), (6, 2)])
def test_msc_equals_the_equation(blocks, memories):
    encoder, decoder = stacks(memories=memories)
    aggregator = randomise(Msc(encoder, blocks).double())
    memory = randomise(MscMemory(encoder, decoder).double())
    count = blocks or memories
    assert len(aggregator.context_norms) == count and len(memory.memory_norms) == memories
    layers = [torch.nn.Sequential(torch.nn.Linear(C, C), torch.nn.Tanh()).double() for _ in range(L)]
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    state = aggregator.start(y_0)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
    actual = [aggregator.finish(state), *memory([], state)]
    norms = pairs(aggregator.context_norms), pairs(memory.memory_norms)
    top, memories = naive_memories.msc(y_0, layers, count, parameters_of(aggregator.cell), *norms)
    modules = [aggregator, memory, *layers]
    sources = [y_0, *(parameter for module in modules for parameter in module.parameters())]
    assert_gradients_equal(actual, [top, *memories], sources)
    # the decoder sees the memories alone: what it trains
    assert_gradients_equal(actual[1:], memories, sources)


def test_msc_in_a_decoder_is_the_plain_stack():
    aggregator = Msc(stacks()[1])
    assert not list(aggregator.parameters())
    x, y = torch.randn(T, B, C), torch.randn(T, B, C)
    state = aggregator.start(x)
    assert torch.equal(aggregator.read(state, 0), x)
    state = aggregator.write(state, 0, y)
    assert len(state) == 1 and torch.equal(aggregator.finish(state), y)


# --- parameters and flags ---


def size(name, vocab, **flags):
    return size_of(full_size(name, vocab, share_all_embeddings=True, share_decoder_input_output_embed=True, **flags))


def test_parameters_of_transparent_attention():
    """17 x 6 weights more; norms of both embeddings, as in the printed 93.87M, are as large as final norms."""
    assert size("transformer_postnorm_16l", 35628, layernorm_embedding=True, **TRANSPARENT) == 93906022
    assert size("transformer_prenorm_16l", 35628, **TRANSPARENT) == 93906022
    assert size("transformer_prenorm_16l", 35628) == 93906022 - 17 * 6


def test_parameters_of_msc():
    """A GRU, a norm for each block and one for each decoder layer; without the final norm of a pre-norm encoder."""
    for name, final in (("transformer_prenorm_18l", 1024), ("transformer_postnorm_18l", 0)):
        more = 6 * 512**2 + 6 * 512 + (6 + 6) * 1024 - final
        assert size(name, 35628, **MSC) == size(name, 35628) + more
    assert size("transformer_prenorm_18l", 35628, **MSC) == 101797888
    assert size("transformer_prenorm_6l_big", 35628, encoder_layers=18, decoder_layers=18, **MSC) == 571928576


def test_parameters_of_layerwise_memories():
    assert size("transformer_prenorm_6l", 34040, **LAYERWISE) == 61569024


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"decoder_memory": "transparant"}, "unknown --decoder-memory transparant (did you mean transparent?)"),
        ({**TRANSPARENT, "transparent_dropout": 1.0}, "--transparent-dropout 1.0 is not a probability: use a value"),
        ({**TRANSPARENT, "transparent_dropout": -0.1}, "--transparent-dropout -0.1 is not a probability"),
        ({"transparent_dropout": 0.2}, "--transparent-dropout has no effect without --decoder-memory transparent: add"),
        ({"msc_blocks": 2}, "--msc-blocks has no effect without --layer-agg msc: add that"),
        ({"decoder_memory": "msc"}, "contexts that --layer-agg residual of the encoder does not compute: add --"),
        ({**MSC, "encoder_layer_agg": "dlcl"}, "--layer-agg dlcl of the encoder does not compute: add --encoder-"),
        ({"layer_agg": "msc"}, "contexts that --decoder-memory last does not read: add --decoder-memory msc"),
        ({**MSC, **TRANSPARENT}, "contexts that --decoder-memory transparent does not read: add --decoder-memory msc"),
        ({**ENCODER_MSC, "decoder_layer_agg": "msc"}, "--layer-agg msc requires an encoder"),
        ({**MSC, "msc_blocks": 0}, "--msc-blocks 0 must be at least 1 with --layer-agg msc"),
        ({**MSC, "msc_blocks": -1}, "--msc-blocks -1 must be"),
        ({**MSC, "msc_blocks": 3}, "--msc-blocks 3 does not divide --encoder-layers 2 into equal blocks"),
        ({**MSC, "encoder_layers": 8, "decoder_layers": 6}, "--decoder-layers 6 does not divide --encoder-layers 8"),
        ({**MSC, "encoder_layers": 9, "decoder_layers": 7}, "use --msc-blocks 9, or another --encoder-layers"),
        ({**MSC, "encoder_layerdrop": 0.1}, "--layer-agg msc requires every layer of the encoder"),
        ({**MSC, "encoder_layers": 0}, "--encoder-layers 1 or more"),
        ({**MSC, "decoder_layers": 0}, "--decoder-layers 0 must be at least 1 with --layer-agg msc"),
        *(
            ({"decoder_memory": kind, flag: value}, f"omit --{flag.replace('_', '-')}, or use --decoder-memory")
            for kind in ("transparent", "layerwise")
            for flag, value in (
                ("encoder_layerdrop", 0.2), ("decoder_layerdrop", 0.2), ("encoder_layers_to_keep", "0"),
                ("decoder_layers_to_keep", "1"), ("no_cross_attention", True),
            )
        ),
        ({**TRANSPARENT, "encoder_layers": 0}, "--decoder-memory transparent requires layers: use --encoder-layers 1"),
        ({**LAYERWISE, "decoder_layers": 0}, "--decoder-memory layerwise requires layers: use --decoder-layers 1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(PRENORM, **flags)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_memory_says_whose_it_is():
    assert {name: MEMORIES.get(name).paper for name in MEMORIES.names()} == {
        "last": "Vaswani 2017", "transparent": "Bapna 2018", "layerwise": "He 2018", "msc": "Wei 2020"
    }  # fmt: skip
