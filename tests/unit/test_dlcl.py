"""DLCL against its equations: values, every gradient, each option, memory, checkpoint keys."""

import itertools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fairseq_deep.aggregators.dlcl import Dlcl
from fairseq_deep.aggregators.residual import Residual
from fairseq_deep.aggregators.weighted_sum import weighted_sum
from fairseq_deep.registry import UsageError
from tests.reference.naive_dlcl import run_stack

T, B, C, L = 7, 3, 12, 5


def run(aggregator, y_0, layers):
    state = aggregator.start(y_0)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
    return aggregator.finish(state)


def make_layers(dtype=torch.float64):
    return [torch.nn.Sequential(torch.nn.Linear(C, C), torch.nn.Tanh()).to(dtype) for _ in range(L)]


def randomise(module):
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            tensor.copy_(torch.randn_like(tensor))
    return module


def naive(aggregator, y_0, layers, **options):
    weight = aggregator.weight.view(L + 1, L + 1, -1)
    norms = [(norm.weight, norm.bias) for norm in aggregator.layer_norms]
    return run_stack(y_0, layers, weight, norms, aggregator.pre_norm, **options)


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "softmax"])
@pytest.mark.parametrize("window", [None, 1, 2])
def test_forward_and_gradients_equal_the_equation(pre_norm, weight_type, normalize, window):
    aggregator = Dlcl(L, C, pre_norm, weight_type=weight_type, normalize=normalize, window=window).double()
    randomise(aggregator)
    layers = make_layers()
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    direction = torch.randn(T, B, C, dtype=torch.float64)

    expected = naive(aggregator, y_0, layers, window=window, normalize=normalize)
    actual = run(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected)
    # with a window of one, or a softmax over one, some norms or weights have no influence
    expected_grads = torch.autograd.grad(expected, sources, direction, allow_unused=True)
    actual_grads = torch.autograd.grad(actual, sources, direction, allow_unused=True)
    for source, want, got in zip(sources, expected_grads, actual_grads):
        zero = torch.zeros_like(source)
        torch.testing.assert_close(zero if got is None else got, zero if want is None else want)


def test_no_norm_and_fixed_weights_equal_the_equation():
    for init, value in (("avg", lambda row: 1 / (row + 1)), ("one", lambda row: 1.0)):
        aggregator = Dlcl(L, C, True, init=init, fixed=True, no_norm=True).double()
        assert not list(aggregator.parameters())
        layers = make_layers()
        y_0 = torch.randn(T, B, C, dtype=torch.float64)
        outputs = [y_0]
        for row in range(L + 1):
            combined = sum(outputs) * value(row)
            if row < L:
                outputs.append(layers[row](combined))
        torch.testing.assert_close(run(aggregator, y_0, layers), combined)


def test_identity_weights_without_norm_are_the_plain_stack():
    aggregator = Dlcl(L, C, True, no_norm=True)
    with torch.no_grad():
        aggregator.weight.copy_(torch.eye(L + 1))
    layers = make_layers(torch.float32)
    y_0 = torch.randn(T, B, C)
    torch.testing.assert_close(run(aggregator, y_0, layers), run(Residual(L, C, True), y_0, layers))


def test_post_norm_starts_with_the_scaled_embedding():
    aggregator = randomise(Dlcl(L, C, False))
    y_0 = torch.randn(T, B, C)
    torch.testing.assert_close(aggregator.read(aggregator.start(y_0), 0), aggregator.weight[0, 0] * y_0)


@pytest.mark.parametrize("init", ["avg", "one"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_start_weights(init, window):
    weight = Dlcl(L, C, True, init=init, window=window).weight
    for row, column in itertools.product(range(L + 1), repeat=2):
        inside = column <= row and (window is None or column > row - window)
        size = min(row + 1, window or row + 1)
        assert weight[row, column].item() == pytest.approx((1 / size if init == "avg" else 1.0) if inside else 0.0)


def test_window_is_a_true_mask():
    aggregator = randomise(Dlcl(L, C, True, window=2))
    layers = make_layers(torch.float32)
    y_0 = torch.randn(T, B, C)
    before = run(aggregator, y_0, layers)
    outside = torch.ones(L + 1, L + 1).tril(-2).bool()
    before.sum().backward()
    assert not aggregator.weight.grad[outside].any()
    assert aggregator.weight.grad[torch.eye(L + 1).bool()].all()
    with torch.no_grad():
        aggregator.weight[outside] = 1e6
    torch.testing.assert_close(run(aggregator, y_0, layers), before)
    state = aggregator.start(y_0)
    for index in range(L):
        state = aggregator.write(state, index, y_0)
    assert len(state) == 2, "entries that nothing reads are not kept"


def test_dropout_acts_on_the_combination_in_training_only():
    aggregator = Dlcl(L, C, True, dropout=0.5)
    y_0 = torch.ones(T, B, C)
    assert set(aggregator.read([y_0], 0).unique().tolist()) == {0.0, 2.0}
    assert aggregator.eval().read([y_0], 0).eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_and_normalises_in_fp32(dtype):
    """31 entries: the result is the exact sum rounded once, and so are the gradients of the weights."""
    torch.manual_seed(1)
    aggregator = Dlcl(30, C, True, normalize=True)
    randomise(aggregator).to(dtype)
    weights = aggregator.row_weights(30)
    assert weights.dtype == torch.float32
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    entries = [torch.randn(T, B, C).to(dtype) for _ in range(31)]
    for entry in entries:
        entry.requires_grad_()
    weights = weights.detach().requires_grad_()
    exact_weights = weights.detach().double().requires_grad_()
    exact = weighted_sum(exact_weights, [entry.detach().double() for entry in entries])
    actual = weighted_sum(weights, entries)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
    direction = torch.randn(T, B, C).to(dtype)
    actual.backward(direction)
    exact.backward(direction.double())
    torch.testing.assert_close(weights.grad.double(), exact_weights.grad, rtol=1e-4, atol=1e-4)
    assert entries[3].grad.dtype == dtype


def saved_storages(function):
    kept = {}

    def pack(tensor):
        storage = tensor.storage() if not hasattr(tensor, "untyped_storage") else tensor.untyped_storage()  # torch 1.13
        kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return len(kept)


@pytest.mark.parametrize("pre_norm, most", [(True, 2), (False, 3)], ids=["pre", "post"])
def test_memory_grows_with_the_number_of_layers_not_its_square(pre_norm, most):
    """Besides what the layers keep: the entry and the input of its norm, and not (L+1)(L+2)/2 copies."""

    def count(num_layers):
        aggregator = Dlcl(num_layers, C, pre_norm)
        y_0 = torch.randn(T, B, C, requires_grad=True)
        layers = [lambda x: x * 2.0] * num_layers  # a layer that saves nothing
        return saved_storages(lambda: run(aggregator, y_0, layers))

    per_layer = [(count(2 * n) - count(n)) / n for n in (8, 16)]
    assert per_layer[0] == per_layer[1]
    # and a norm's mean and deviation, its gain, and the row of weights
    assert per_layer[0] <= most + 5


def test_checkpoint_keys_are_the_published_ones():
    keys = set(Dlcl(2, C, True).state_dict())
    assert keys == {"weight"} | {f"layer_norms.{i}.{part}" for i in range(2) for part in ("weight", "bias")}
    assert set(Dlcl(2, C, True, fixed=True).state_dict()) == keys


def test_keys_of_the_original_code_are_renamed():
    theirs, ours = randomise(Dlcl(L, C, True)), Dlcl(L, C, True)
    old = {"encoder.history.weight": theirs.weight.detach().unsqueeze(-1)}
    for index, norm in enumerate(theirs.layer_norms):
        old[f"encoder.history.layer_norms.{index + 1}.weight"] = norm.weight.detach()
        old[f"encoder.history.layer_norms.{index + 1}.bias"] = norm.bias.detach()
    for _ in range(2):  # fairseq may upgrade twice
        ours.upgrade_state_dict_named(old, "encoder.history")
    ours.load_state_dict({key[len("encoder.history."):]: value for key, value in old.items()})
    for want, got in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(want, got)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"init": "two"}, "--dlcl-init two"),
        ({"weight_type": "scalar_5"}, "5 does not divide the width 12"),
        ({"weight_type": "scalar_0"}, "--dlcl-weight-type scalar_0"),
        ({"weight_type": "matrix"}, "scalar_N"),
        ({"window": 0}, "--dlcl-window 0"),
        ({"dropout": 1.0}, "--dlcl-dropout 1.0"),
        ({"no_norm": True, "pre_norm": False}, "--dlcl-no-norm needs a pre-norm stack"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(UsageError) as error:
        Dlcl(L, C, **{"pre_norm": True, **options})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_weight_matrix_shows_what_is_used():
    aggregator = randomise(Dlcl(L, C, True, window=2))
    matrix = aggregator.weight_matrix()[..., 0]
    used = torch.ones(L + 1, L + 1).tril().triu(-1).bool()
    assert torch.equal(matrix[used], aggregator.weight.detach()[used])
    assert not matrix[~used].any()
