"""DLCL against its equations: values, every gradient, each option, memory, checkpoint keys."""

import itertools

import pytest
import torch

from fairseq_deep.core import checkpoints
from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.aggregators.residual import Residual
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.models import make_batch
from tests.helpers.tensors import randomise, saved_bytes
from tests.reference.naive_dlcl import run_stack

T, B, C, L = 7, 3, 12, 5


def naive(aggregator, y_0, layers, **options):
    weight = aggregator.weight.view(L + 1, L + 1, -1)
    norms = [(norm.weight, norm.bias) for norm in aggregator.layer_norms]
    first = aggregator.first_norm and (aggregator.first_norm.weight, aggregator.first_norm.bias)
    return run_stack(y_0, layers, weight, norms, aggregator.pre_norm, first_norm=first, **options)


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "softmax"])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("norm_first", [False, True], ids=["as-coded", "as-printed"])
def test_forward_and_gradients_equal_the_equation(pre_norm, weight_type, normalize, window, norm_first):
    options = {"weight_type": weight_type, "normalize": normalize, "window": window, "norm_first": norm_first}
    aggregator = Dlcl(Stack(L, C, pre_norm), **options).double()
    randomise(aggregator)
    layers = make_layers(L, C)
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


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
def test_the_first_norm_is_the_only_difference_of_the_printed_equations(pre_norm):
    printed, coded = (randomise(Dlcl(Stack(L, C, pre_norm), norm_first=first)) for first in (True, False))
    added = printed.load_state_dict(coded.state_dict(), strict=False).missing_keys
    assert added == ["first_norm.weight", "first_norm.bias"] and printed.first_norm.weight.numel() == C
    layers, y_0 = make_layers(L, C, torch.float32), 3 + 2 * torch.randn(T, B, C)
    assert (run(printed, y_0, layers) - run(coded, y_0, layers)).abs().max() > 0.01
    with pytest.raises(UsageError, match="--dlcl-norm-first is one of the norms that --dlcl-no-norm omits"):
        Dlcl(Stack(L, C, True), no_norm=True, norm_first=True)


def test_no_norm_and_fixed_weights_equal_the_equation():
    for init, value in (("avg", lambda row: 1 / (row + 1)), ("one", lambda row: 1.0)):
        aggregator = Dlcl(Stack(L, C, True), init=init, fixed=True, no_norm=True).double()
        assert not list(aggregator.parameters())
        layers = make_layers(L, C)
        y_0 = torch.randn(T, B, C, dtype=torch.float64)
        outputs = [y_0]
        for row in range(L + 1):
            combined = sum(outputs) * value(row)
            if row < L:
                outputs.append(layers[row](combined))
        torch.testing.assert_close(run(aggregator, y_0, layers), combined)


def test_identity_weights_without_norm_are_the_plain_stack():
    aggregator = Dlcl(Stack(L, C, True), no_norm=True)
    with torch.no_grad():
        aggregator.weight.copy_(torch.eye(L + 1))
    layers = make_layers(L, C, torch.float32)
    y_0 = torch.randn(T, B, C)
    torch.testing.assert_close(run(aggregator, y_0, layers), run(Residual(Stack(L, C, True)), y_0, layers))


def almost_last(aggregator):
    with torch.no_grad():
        aggregator.weight[2, 1] += 1e-6
    return aggregator


@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
def test_what_is_a_plain_stack_is_told(weight_type):
    def make(pre_norm=True, **options):
        return Dlcl(Stack(L, C, pre_norm), weight_type=weight_type, **options)

    assert make(no_norm=True, init="last").is_plain()
    assert make(no_norm=True, init="one", window=1).is_plain()
    assert make(no_norm=True, normalize=True, window=1).is_plain()
    assert not make(no_norm=True).is_plain() and not make(no_norm=True, normalize=True).is_plain()
    assert not almost_last(make(no_norm=True, init="last")).is_plain()
    assert not make(init="last").is_plain() and not make(False, init="last").is_plain()


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
def test_with_norms_on_entries_no_weights_make_a_plain_stack(pre_norm):
    """What a plain layer reads doubles with the output below it; a norm's output does not, whatever W is."""
    aggregator, y_0 = Dlcl(Stack(L, C, pre_norm)).double(), torch.randn(T, B, C, dtype=torch.float64)
    output = 9 * torch.randn_like(y_0)
    for _ in range(5):
        randomise(aggregator)
        with torch.no_grad():
            aggregator.weight[1, 0] = 0  # a plain layer reads nothing else
        first, second = (
            aggregator.read(aggregator.write(aggregator.start(y_0), 0, y), 1) for y in (output, 2 * output)
        )
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
        assert (second - 2 * first).abs().max() > 0.1
    with torch.no_grad():
        aggregator.weight.copy_(torch.eye(L + 1))
    layers = make_layers(L, C)
    plain = run(Residual(Stack(L, C, pre_norm)), y_0, layers)
    assert (run(aggregator, y_0, layers) - plain).abs().max() > 0.1


def test_post_norm_starts_with_the_scaled_embedding():
    aggregator = randomise(Dlcl(Stack(L, C, False)))
    y_0 = torch.randn(T, B, C)
    torch.testing.assert_close(aggregator.read(aggregator.start(y_0), 0), aggregator.weight[0, 0] * y_0)


@pytest.mark.parametrize("init", ["avg", "one", "last"])
@pytest.mark.parametrize("window", [None, 1, 3, L + 1, L + 5])
def test_start_weights(init, window):
    weight = Dlcl(Stack(L, C, True), init=init, window=window).weight
    for row, column in itertools.product(range(L + 1), repeat=2):
        inside = column <= row and (window is None or column > row - window)
        size = min(row + 1, window or row + 1)
        value = {"avg": 1 / size, "one": 1.0, "last": float(row == column)}[init]
        assert weight[row, column].item() == pytest.approx(value if inside else 0.0)


def test_last_without_norms_starts_as_the_plain_stack(build, batch):
    """DenseFormer."""
    plain = build("transformer_prenorm_2l2l_tiny").double().eval()
    dense = build("transformer_dlcl_2l2l_tiny", dlcl_init="last", dlcl_no_norm=True).double().eval()
    dense.load_state_dict({**dense.state_dict(), **plain.state_dict()})
    torch.testing.assert_close(dense(*batch)[0], plain(*batch)[0], rtol=1e-12, atol=1e-12)


def test_window_is_a_true_mask():
    aggregator = randomise(Dlcl(Stack(L, C, True), window=2))
    layers = make_layers(L, C, torch.float32)
    y_0 = torch.randn(T, B, C)
    before = run(aggregator, y_0, layers)
    outside = torch.ones(L + 1, L + 1).tril(-2).bool()
    before.sum().backward()
    assert not aggregator.weight.grad[outside].any()
    assert aggregator.weight.grad[torch.eye(L + 1).bool()].all()
    with torch.no_grad():
        aggregator.weight[outside] = 1e6
    torch.testing.assert_close(run(aggregator, y_0, layers), before)
    with torch.no_grad():
        state = aggregator.start(y_0)
        for index in range(L):
            state = aggregator.write(state, index, y_0)
    assert len(state) == 1 + 2, "entries that nothing reads are not kept"


def test_dropout_acts_on_the_combination_in_training_only():
    aggregator = Dlcl(Stack(L, C, True), dropout=0.5)
    y_0 = torch.ones(T, B, C)
    state = aggregator.start(y_0)
    assert set(aggregator.read(state, 0).unique().tolist()) == {0.0, 2.0}
    assert aggregator.eval().read(state, 0).eq(1).all()


def test_dropout_follows_the_norm_in_post_norm():
    aggregator = Dlcl(Stack(L, C, False), dropout=0.5)
    state = aggregator.write(aggregator.start(torch.randn(T, B, C)), 0, torch.randn(T, B, C))
    dropped = aggregator.read(state, 1)
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * aggregator.eval().read(state, 1)[kept])


def test_the_gradient_of_half_precision_weights_does_not_overflow():
    """It sums over all positions and features: here 40,000, beyond what fp16 can hold once it is scaled."""
    aggregator = Dlcl(Stack(2, 100, True)).half()
    x = torch.ones(20, 20, 100, dtype=torch.float16)
    (aggregator.read(aggregator.start(x), 0).float() * 100.0).sum().backward()
    assert aggregator.weight.grad[0, 0] == 4e6
    aggregator.double().half()
    assert aggregator.weight.dtype == aggregator.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stay_exact_in_half_precision(dtype):
    aggregator = randomise(Dlcl(Stack(L, C, True), normalize=True))
    exact = aggregator.weight.detach().clone()
    aggregator.to(dtype)
    assert aggregator.layer_norms[0].weight.dtype == dtype
    assert torch.equal(aggregator.weight, exact), "W stays as it was, in fp32"
    assert aggregator.weights().sum(1).sub(1).abs().max() < 1e-6


class Stacked(Dlcl):
    """The naive combination, which keeps a copy of all entries for each of its sums."""

    def start(self, x):
        return [x]

    def read(self, state, layer):
        return (torch.stack(state) * self.weight[layer, : layer + 1].view(-1, 1, 1, 1)).sum(0)

    def write(self, state, layer, output):
        return state + [self._norm(output, layer)]


def test_memory_grows_with_the_number_of_layers_not_its_square():
    """Per layer: the entry and the input of its norm, and a little for the norm and the weights."""
    size = 64 * B * C * 4  # bytes of an entry, large against what does not count

    def growth(kind, num_layers):
        """Entries that a layer adds to a stack of *num_layers* layers that save nothing themselves."""

        def total(layers):
            aggregator = kind(Stack(layers, C))
            y_0 = torch.randn(64, B, C, requires_grad=True)
            return saved_bytes(lambda: run(aggregator, y_0, [lambda x: x * 2.0] * layers), aggregator.parameters())

        return (total(2 * num_layers) - total(num_layers)) / num_layers / size

    assert growth(Dlcl, 16) == pytest.approx(growth(Dlcl, 8), abs=0.2)
    assert growth(Dlcl, 16) < 2.3
    assert growth(Stacked, 16) > 20, "the measure sees the naive form"


def test_thirty_layers_save_at_most_a_fifth_more_than_the_plain_stack(build, dictionary):
    batch = make_batch(dictionary, lengths=(40,) * 8, target_lengths=(40,) * 8)
    saved = {}
    for name in ("transformer_prenorm_30l", "transformer_dlcl_30l"):
        model = build(name, dropout=0.1)
        saved[name] = saved_bytes(lambda model=model: model(*batch), model.parameters())
    assert saved["transformer_dlcl_30l"] <= 1.20 * saved["transformer_prenorm_30l"]


def test_checkpoint_keys_are_the_published_ones():
    keys = set(Dlcl(Stack(2, C, True)).state_dict())
    assert keys == {"weight"} | {f"layer_norms.{i}.{part}" for i in range(2) for part in ("weight", "bias")}
    assert set(Dlcl(Stack(2, C, True), fixed=True).state_dict()) == keys


def test_keys_of_the_original_code_are_renamed():
    theirs, ours = randomise(Dlcl(Stack(L, C, True))), Dlcl(Stack(L, C, True))
    old = {"encoder.history.weight": theirs.weight.detach().unsqueeze(-1)}
    for index, norm in enumerate(theirs.layer_norms):
        old[f"encoder.history.layer_norms.{index + 1}.weight"] = norm.weight.detach()
        old[f"encoder.history.layer_norms.{index + 1}.bias"] = norm.bias.detach()
    for _ in range(2):  # fairseq may upgrade twice
        checkpoints.upgrade_dlcl(ours, old, "encoder.history")
    ours.load_state_dict({key[len("encoder.history.") :]: value for key, value in old.items()})
    for want, got in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(want, got)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"init": "two"}, "--dlcl-init two"),
        ({"weight_type": "scalar_5"}, "5 does not divide the width 12"),
        ({"weight_type": "scalar_0"}, "--dlcl-weight-type scalar_0"),
        ({"weight_type": "matrix"}, "scalar_N"),
        ({"weight_type": "vector_3"}, "--dlcl-weight-type vector_3"),
        ({"window": 0}, "--dlcl-window 0"),
        ({"dropout": 1.0}, "--dlcl-dropout 1.0"),
        ({"no_norm": True, "pre_norm": False}, "--dlcl-no-norm requires a pre-norm stack"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(UsageError) as error:
        Dlcl(Stack(L, C, options.pop("pre_norm", True)), **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
