"""Decoders with every --decoder-attn against the equations: layers, whole models, every gradient, dropout."""

import pytest
import torch

from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.layers import DecoderContext
from tests.helpers.decoder_attention import (
    KINDS,
    LUNA,
    NEAR,
    PAD,
    assert_same_gradients,
    both_contexts,
    make_layer,
    make_model,
    naive_layer,
    naive_scores,
)
from tests.helpers.equations import projections
from tests.helpers.layers import B, C, E, S, T
from tests.helpers.tensors import DOUBLE
from tests.reference import naive_average
from tests.reference.naive_lstm import attention


def test_every_attention_is_tested():
    kinds = {flags.get("decoder_attn", "self") for flags in (*KINDS.values(), LUNA)}
    assert kinds == set(DECODER_ATTENTIONS.names())


@both_contexts
def test_scores_and_gradients_equal_the_equations(kind, stack, full_context, build, batch):
    model, (source, lengths, target) = make_model(build, kind, stack), batch
    words = target.ne(PAD)
    expected = naive_scores(model, kind, stack, *batch, not full_context)[words]
    encoder_out = model.encoder(source, lengths)
    actual = model.decoder(target, encoder_out=encoder_out, full_context_alignment=full_context)[0][words]
    torch.testing.assert_close(actual, expected, **NEAR)
    assert_same_gradients(model, expected, actual)


@pytest.mark.parametrize("options", [{"merge": "concat"}, {"merge": "two"}, {"attn_residual": False}], ids=str)
def test_average_attention_in_every_layer_of_a_depthwise_lstm(options, build, batch):
    flags, words = {f"lstm_{key}": value for key, value in options.items()}, batch[2].ne(PAD)
    model = make_model(build, "average", "lstm", **flags)
    expected, actual = naive_scores(model, "average", "lstm", *batch, **options)[words], model(*batch)[0][words]
    torch.testing.assert_close(actual, expected, **NEAR)
    assert_same_gradients(model, expected, actual)


def layer_inputs(dim=C):
    return torch.randn(T, B, C, requires_grad=True, **DOUBLE), torch.randn(S, B, dim, requires_grad=True, **DOUBLE)


def future_mask():
    return torch.full((T, T), -1e4, **DOUBLE).triu(1)


# columns of the target (second sentence, third) and of the source (first, second) that are padding
PADDING = {"none": (), "left": (0, [0, 1]), "right": ([4], -1), "middle": (2, [1, 3])}


@pytest.mark.parametrize("kind, dim", [(kind, dim) for kind in KINDS for dim in (C, E) if (kind, dim) != ("merged", E)])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("padding", PADDING)
def test_layers_equal_the_equations(kind, pre_norm, padding, dim):
    """Also where the encoder has another width; merged attention has one matrix for the values of both sides."""
    layer, (x, memory) = make_layer(kind, pre_norm=pre_norm, encoder_dim=dim), layer_inputs(dim)
    words, source = torch.ones(B, T, dtype=torch.bool), torch.ones(B, S, dtype=torch.bool)
    for sentence, columns in enumerate(PADDING[padding]):
        words[sentence + 1, columns] = source[sentence, columns] = False

    def seen(b, i, j):
        return bool(source[b, j])

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; nobody sees that
        return j <= i and (bool(words[b, j]) or j == i)

    masks = {} if padding == "none" else {"memory_padding": ~source, "padding": ~words}
    actual, attn = layer(x, DecoderContext(memory, mask=future_mask(), **masks))
    assert attn is None
    expected = naive_layer(layer, kind, pre_norm, memory, seen, earlier, naive_average.average_mask(words))(x)
    actual, expected = actual.transpose(0, 1)[words], expected.transpose(0, 1)[words]
    torch.testing.assert_close(actual, expected, **NEAR)
    direction, sources = torch.randn_like(actual), [x, memory, *layer.parameters()]
    wanted = torch.autograd.grad(expected, sources, direction)
    for want, got in zip(wanted, torch.autograd.grad(actual, sources, direction)):
        torch.testing.assert_close(got, want, **NEAR)


def test_values_and_outputs_of_merged_attention_are_one_parameter():
    """The gradient of W_v, W_o and their biases is the sum of what comes from both paths, and each gives some."""
    layer, (x, memory) = make_layer("merged"), layer_inputs()
    names = {name for name, _ in layer.named_parameters()}
    roles = {"encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj", "fc1", "fc2"}
    roles |= {"encoder_attn_layer_norm", "final_layer_norm"}
    assert names == {f"{role}.{part}" for role in roles for part in ("weight", "bias")}
    output, _ = layer.attend(x, DecoderContext(memory, mask=future_mask()), False)
    both, direction = projections(layer.encoder_attn), torch.randn_like(output)
    shared = [*both["v"], *both["out"]]
    copies = [[part.detach().clone().requires_grad_() for part in shared] for _ in range(2)]
    (v_1, b_1, o_1, c_1), (v_2, b_2, o_2, c_2) = copies
    to_source = {**both, "v": (v_1, b_1), "out": (o_1, c_1)}
    mask = naive_average.average_mask(torch.ones(B, T, dtype=torch.bool))
    saan = naive_average.mean(x @ v_2.T + b_2, mask) @ o_2.T
    expected = attention(x, memory, to_source, 2, lambda b, i, j: True)[0] + saan + 0 * c_2.sum()
    torch.testing.assert_close(output, expected, **NEAR)
    got = torch.autograd.grad(output, shared, direction)
    first = torch.autograd.grad(expected, copies[0], direction, retain_graph=True)
    second = torch.autograd.grad(expected, copies[1], direction)
    for index, (want_1, want_2) in enumerate(zip(first, second)):
        assert want_1.any() and (want_2.any() or index == 3), "the bias of W_o is added once"
        torch.testing.assert_close(got[index], want_1 + want_2, **NEAR)
