"""The encoder of GTrans: the equation, its limit, half precision, whole models, bad input."""

import pytest
import torch

from fairseq_deep.core.aggregators.gtrans import GTrans
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import TINY, full_size, size_of
from tests.helpers.tensors import assert_same_gradients, randomise
from tests.reference.naive_gtrans import gtrans

T, B, C, L = 3, 2, 12, 5
GTRANS = {"layer_agg": "gtrans"}
both_norms = pytest.mark.parametrize("norm", ["pre", "post"])


@both_norms
@pytest.mark.parametrize("group_layers", [1, 2, 3, 5, 8])
def test_forward_and_gradients_equal_the_equation(norm, group_layers):
    aggregator = randomise(GTrans(Stack(L, C, norm == "pre"), group_layers).double())
    layers, y_0 = make_layers(L, C), torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    own = aggregator.fusion_norm
    own = None if own is None else (own.weight, own.bias)
    expected = gtrans(y_0, layers, aggregator.fusion.weight, group_layers, own)
    actual = run(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected)
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    assert all(grad.any() for grad in assert_same_gradients(actual, expected, sources))


def test_start_values():
    aggregator = GTrans(Stack(7, C))
    assert aggregator.fusion.weight.tolist() == pytest.approx([1 / 3] * 3) and aggregator.fusion_norm is None
    assert {name: value.item() for name, value in aggregator.record().items()} == pytest.approx(
        {f"group_{number}": 1 / 3 for number in (1, 2, 3)}
    )
    decoder = GTrans(Stack(7, C, side="decoder"))
    assert not list(decoder.parameters()) and not decoder.record()


def test_weight_on_the_last_group_only_is_the_plain_model(build, batch):
    """Also where there is one group: then a fresh model is plain."""
    flags = {**GTRANS, "encoder_layers": 4, "gtrans_group_layers": 2}
    model, plain = build(TINY["pre"], **flags).eval(), build(TINY["pre"], encoder_layers=4).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(model(*batch)[0], plain(*batch)[0], atol=1e-3)
    with torch.no_grad():
        model.encoder.aggregator.fusion.weight.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])
    one = build(TINY["pre"], **GTRANS).eval()
    plain = build(TINY["pre"]).eval()
    plain.load_state_dict(one.state_dict(), strict=False)
    torch.testing.assert_close(one(*batch)[0], plain(*batch)[0])


@pytest.mark.parametrize("check", sorted(INVARIANCES))
def test_what_holds_for_every_model(check, build, dictionary):
    INVARIANCES[check](lambda **more: build(TINY["post"], **{**GTRANS, "gtrans_group_layers": 1, **more}), dictionary)


@both_norms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(norm, dtype):
    exact = GTrans(Stack(L, 64, norm == "pre"), 2)
    state = [torch.randn(9, 1, 64).to(dtype).requires_grad_() for _ in range(3)]
    expected = exact.finish([top.float() for top in state])
    exact.to(dtype)
    output = exact.finish(state)
    assert output.dtype == dtype and exact.fusion.weight.dtype == torch.float32
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    (3e4 * output.float()).sum().backward()
    assert exact.fusion.weight.grad.dtype == torch.float32 and exact.fusion.weight.grad.isfinite().all()


@pytest.mark.parametrize("norm, added", [("pre", 4), ("post", 4 + 2 * 512)])
def test_parameter_counts(norm, added):
    plain = full_size(f"transformer_{norm}norm_12l", 34040)
    assert size_of(full_size(f"transformer_{norm}norm_12l", 34040, **GTRANS)) == size_of(plain) + added


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"gtrans_group_layers": 0}, "--gtrans-group-layers 0 must be at least 1"),
        ({"encoder_layers": 0}, "use --encoder-layers 1 or more"),
        ({"encoder_layerdrop": 0.1}, "omit --encoder-layerdrop"),
        ({"encoder_layer_agg": "dlcl", "decoder_layer_agg": "gtrans"}, "requires an encoder, and --decoder-layer-agg"),
        ({"layer_agg": "residual", "gtrans_group_layers": 2}, "--gtrans-group-layers has no effect without"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY["pre"], **{**GTRANS, **flags})
    assert words in str(error.value) and "\n" not in str(error.value)
