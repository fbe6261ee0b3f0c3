"""Dynamic DLCL (one-way MUDDFormer): the equation, the plain start, half precision, memory, whole models."""

import pytest
import torch

from fairseq_deep.core.aggregators.mudd import Mudd
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import TINY
from tests.helpers.tensors import randomise, saved_bytes, shake
from tests.reference.naive_mudd import mudd

T, B, C, L = 5, 3, 7, 4
MUDD = {"layer_agg": "mudd"}


def make(layers=L, dim=C, **options):
    return Mudd(Stack(layers, dim, **options))


def path_of(aggregator, y_0, layers):
    """The inputs of all layers, and the output."""
    state, path = aggregator.start(y_0), []
    for index, layer in enumerate(layers):
        path.append(aggregator.read(state, index))
        state = aggregator.write(state, index, layer(path[-1]))
    return torch.stack([*path, aggregator.finish(state)])


def naive(aggregator, y_0, layers):
    parameters = [(hidden.weight.T, out.weight.T, out.bias) for hidden, out in zip(aggregator.hidden, aggregator.out)]
    return torch.stack(mudd(y_0, layers, parameters))


@pytest.mark.parametrize("layers", [1, L])
def test_the_equation_forward_and_backward(layers):
    aggregator, functions = shake(make(layers).double(), 0.5), make_layers(layers, C)
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    want, got = naive(aggregator, y_0, functions), path_of(aggregator, y_0, functions)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(path_of(aggregator, y_0, functions), want)
    sources = [y_0, *aggregator.parameters(), *(p for layer in functions for p in layer.parameters())]
    direction = torch.randn_like(want)
    wanted = torch.autograd.grad(want, sources, direction)
    for want_grad, got_grad in zip(wanted, torch.autograd.grad(got, sources, direction)):
        torch.testing.assert_close(got_grad, want_grad)
        assert want_grad.any()


def test_start_values():
    aggregator = make(20, 256)
    assert [tuple(hidden.weight.shape) for hidden in aggregator.hidden] == [(size, 256) for size in range(2, 22)]
    assert aggregator.hidden[-1].weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert not any(out.weight.any() for out in aggregator.out) and not aggregator.matrices()
    assert torch.equal(aggregator.weights(), torch.eye(21))
    record = {name: value.item() for name, value in aggregator.record().items()}
    assert record["newest"] == 1 and record["previous"] == record["older"] == 0
    assert torch.equal(make(0).weights(), torch.ones(1, 1))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_fresh_model_is_the_plain_one(norm, build, batch):
    model, plain = build(TINY[norm], **MUDD).double(), build(TINY[norm]).double()
    torch.nn.Module.load_state_dict(model, plain.state_dict(), strict=False)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(*batch)[0], plain.train(mode)(*batch)[0], rtol=1e-12, atol=1e-12)
    randomise(model.encoder.aggregator)
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], rtol=0.01)


@pytest.mark.parametrize("check", sorted(INVARIANCES))
def test_what_holds_for_every_model(check, build, dictionary):
    def make_model(**more):
        model = build(TINY["pre"], **{**MUDD, **more})
        for stack in (model.encoder, model.decoder):
            for out in stack.aggregator.out:
                torch.nn.init.normal_(out.weight, std=0.3)
        return model

    INVARIANCES[check](make_model, dictionary)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
def test_half_precision(dtype, trains):
    """Weights and sums are of fp32: squares beyond fp16 do not overflow, entries that cancel leave what is small."""
    aggregator = shake(make(2), 0.3)
    exact = aggregator.hidden[0].weight.detach().clone()
    aggregator.to(dtype)
    assert torch.equal(aggregator.hidden[0].weight, exact) and exact.dtype == torch.float32
    with torch.no_grad():
        aggregator.out[1].weight.zero_()
        aggregator.out[1].bias.copy_(torch.tensor([0.0, 1 + 2**-13, -1.0]))
    x = torch.full((T, B, C), 3e4).to(dtype).requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        output = run(aggregator, x, [lambda x: torch.full_like(x, 3e4), lambda x: torch.full_like(x, 3e4)])
    assert output.dtype == dtype
    value = torch.tensor(3e4).to(dtype).float() * 2**-13
    torch.testing.assert_close(output.float(), value.expand(T, B, C), rtol=1e-2, atol=1e-3)
    if trains:
        output.float().sum().backward()
        gradients = [x.grad, *(p.grad for p in aggregator.out[1].parameters())]
        assert all(gradient.isfinite().all() for gradient in gradients)
        # entries of 3e4 at 15 positions of 7 features
        assert aggregator.out[1].bias.grad[0] > 3e6 and aggregator.out[1].bias.grad.dtype == torch.float32


def test_autocast_does_not_lower_the_sums():
    aggregator, x, outputs = shake(make(2)), torch.randn(T, B, C), torch.randn(2, T, B, C)
    layers = [lambda x: outputs[0], lambda x: outputs[1]]
    expected = path_of(aggregator, x, layers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = path_of(aggregator, x, layers)
    assert torch.equal(lowered, expected)


def test_memory_grows_with_the_number_of_layers_not_its_square():
    """Per layer: the entry and small weights."""
    width = 128
    size = 64 * B * width * 4

    def total(layers):
        aggregator, y_0 = make(layers, width), torch.randn(64, B, width, requires_grad=True)
        return saved_bytes(lambda: run(aggregator, y_0, [lambda x: x * 2.0] * layers), aggregator.parameters())

    growth = [(total(2 * layers) - total(layers)) / layers / size for layers in (8, 16)]
    assert growth[0] < 1.6 and growth[1] - growth[0] < 0.5, "only the weights of a sum grow with what it reads"


def test_only_what_every_layer_takes_part_in(build):
    with pytest.raises(UsageError, match="omit --encoder-layerdrop") as error:
        build(TINY["pre"], **MUDD, encoder_layerdrop=0.1)
    assert "\n" not in str(error.value)
