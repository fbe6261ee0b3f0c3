"""Multi-head attention against its equations: masks, relative positions, memories; dropout, initial values."""

import pytest
import torch

from fairseq_deep.core.attention import MultiheadAttention
from fairseq_deep.core.attention.masks import padding_bias
from tests.helpers.equations import projections
from tests.helpers.tensors import DOUBLE, assert_same, randomise
from tests.reference.naive_lstm import attention as naive_attention
from tests.reference.naive_lstm import relative_vector

T, B, C, H, S, KDIM = 6, 3, 10, 2, 5, 7
NEAR = {"rtol": 1e-8, "atol": 1e-10}
ROUNDED = {"rtol": 1e-4, "atol": 1e-4}  # where weights are asked for, they are of fp32
# padding of sentences 1 and 2, on the left, on the right, and in the middle
PADDING = {"none": ([], []), "left": ([0], [0, 1]), "right": ([4, 5], [5]), "middle": ([2], [3, 4])}


def make(**options):
    return randomise(MultiheadAttention(C, H, **options).double())


def padding_mask(kind, length=T):
    mask = torch.zeros(B, length, dtype=torch.bool)
    for sentence, columns in enumerate(PADDING[kind], start=1):
        mask[sentence, [column for column in columns if column < length]] = True
    return mask if kind != "none" else None


def future_mask(length=T):
    return torch.full((length, length), float("-inf"), **DOUBLE).triu(1)


def naive(module, query, memory=None, padding=None, causal=False, relative=None, relative_value=None):
    def visible(b, i, j):
        return not (causal and j > i) and not (padding is not None and padding[b, j])

    memory = query if memory is None else memory
    return naive_attention(query, memory, projections(module), H, visible, relative, relative_value)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("causal", [False, "mask", "flag"], ids=str)
@pytest.mark.parametrize(
    "clip, values", [(None, False), (1, False), (2, False), (9, False), (1, True), (3, True)], ids=str
)
@pytest.mark.parametrize("products", ["plain", "fused", "weights"])
def test_self_attention_equals_the_equations(padding, causal, clip, values, products):
    """With boolean masks, and with the bias and the flag that replace them in the layers of a model.

    Training has plain products on a CPU, evaluation has fused ones.
    """
    module = make(bias=clip != 1, relative_positions=clip, relative_values=values, causal=bool(causal))
    module.train(products == "plain")
    table, padding, need_weights = module.relative_keys, padding_mask(padding), products == "weights"
    if clip is not None:
        assert table.shape == (clip + 2 if causal else 2 * clip + 1, C // H)
    assert (module.relative_values is not None) is values
    assert not values or module.relative_values.shape == table.shape
    if causal and padding is not None:
        padding[:, 0] = False  # a first query must see a key
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    relative = None if clip is None else relative_vector(table, clip, bool(causal))
    value = relative_vector(module.relative_values, clip, bool(causal)) if values else None
    hidden = padding_bias(padding, torch.float64) if causal == "flag" and padding is not None else padding
    masks = {"causal": True} if causal == "flag" else {"attn_mask": future_mask() if causal else None}

    actual, weights = module(query, key_padding_mask=hidden, need_weights=need_weights, **masks)
    expected, expected_weights = naive(module, query, None, padding, causal, relative, value)
    near = ROUNDED if need_weights else NEAR
    torch.testing.assert_close(actual, expected, **near)
    assert (weights is not None) is need_weights
    if need_weights:
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)
    assert_same(actual, expected, [query, *module.parameters()], **near)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kdim", [None, KDIM], ids=["one width", "another width"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_attention_to_a_memory_equals_the_equations(bias, kdim, padding, need_weights):
    module, padding = make(bias=bias, kdim=kdim), padding_mask(padding, S)
    assert module.k_proj.weight.shape == module.v_proj.weight.shape == (C, kdim or C)
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    memory = torch.randn(S, B, kdim or C, requires_grad=True, **DOUBLE)
    actual, weights = module(query, memory, key_padding_mask=padding, need_weights=need_weights)
    expected, expected_weights = naive(module, query, memory, padding)
    near = ROUNDED if need_weights else NEAR
    torch.testing.assert_close(actual, expected, **near)
    if need_weights:
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)
    assert_same(actual, expected, [query, memory, *module.parameters()], **near)


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_dropout_acts_on_the_weights_in_training_only(need_weights):
    """Values of one, projected by nothing: the output is the sum of the weights that are left, doubled."""
    module = MultiheadAttention(2, 1, dropout=0.5, bias=False)
    with torch.no_grad():
        module.q_proj.weight.zero_()
        module.out_proj.weight.copy_(torch.eye(2))
        module.v_proj.weight.copy_(torch.eye(2))
    x = torch.ones(8, 40, 2)
    output = module(x, need_weights=need_weights)[0].detach()
    eighths = set((output * 4).round(decimals=4).unique().tolist())
    assert eighths <= set(map(float, range(9))) and len(eighths) > 4
    assert output.mean() == pytest.approx(1.0, abs=0.1)
    torch.testing.assert_close(module.eval()(x, need_weights=need_weights)[0], x)


@pytest.mark.parametrize("start, padding", [(1, "none"), (1, "right"), (1, "middle"), (3, "middle"), (3, "left")])
@pytest.mark.parametrize("clip", [None, 1, 3], ids=lambda clip: f"K={clip}")
def test_incremental_equals_full(padding, clip, start):
    """The mask is that of the new positions; some can be given at once, as they must where the first are padding."""
    module, padding = make(relative_positions=clip, causal=True).eval(), padding_mask(padding)
    query, caches, outputs = torch.randn(T, B, C, **DOUBLE), {}, []
    mask = future_mask().clamp(min=-1e4)  # as the decoder has it, so that rows of padding do not become NaN
    for begin, end in [(0, start), *((i, i + 1) for i in range(start, T))]:
        seen = None if padding is None else padding[:, :end]
        rows = mask[begin:end, :end] if end - begin > 1 else None
        outputs.append(module(query[begin:end], None, seen, rows, incremental_state=caches)[0])
    words = slice(None) if padding is None else ~padding.T
    torch.testing.assert_close(torch.cat(outputs)[words], module(query, None, padding, mask)[0][words], **NEAR)
    ((key, cache),) = caches.items()
    assert key.endswith("target") and cache["cache"].shape == (2, B, H, T, C // H)


def test_training_rounds_alike_with_and_without_gradients():
    """Recomputation trusts in it: its first pass has no gradients, its second one has."""
    attention, x = MultiheadAttention(16, 2, dropout=0.1), torch.randn(30, 3, 16)
    found = []
    for wanted in (False, True):
        torch.manual_seed(1)
        with torch.set_grad_enabled(wanted):
            found.append(attention(x, causal=True)[0])
    assert torch.equal(*found)
