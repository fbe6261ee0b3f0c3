"""Multi-head attention against its equations: masks, positions, memories, all options; dropout, steps."""

import itertools

import pytest
import torch

from fairseq_deep.core.attention import MultiheadAttention
from fairseq_deep.core.attention.masks import padding_bias
from fairseq_deep.core.stack import Stack
from tests.helpers.equations import projections
from tests.helpers.tensors import DOUBLE, assert_same, randomise
from tests.reference.naive_attention import attention as naive_attention
from tests.reference.naive_attention import relative_vector

T, B, C, H, S, KDIM = 6, 3, 16, 4, 5, 7
NEAR = {"rtol": 1e-8, "atol": 1e-10}
ROUNDED = {"rtol": 1e-4, "atol": 1e-4}  # where weights are asked for, they are of fp32; as tables of rotations are
# padding of sentences 1 and 2, on the left, on the right, and in the middle
PADDING = {"none": ([], []), "left": ([0], [0, 1]), "right": ([4, 5], [5]), "middle": ([2], [3, 4])}
KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "grouped": {"kv_heads": 2},
    "one key-value head, QK-norm": {"kv_heads": 1, "qk_norm": True},
    "gate of heads": {"attention_gate": "heads"},
    "gate of features, grouped": {"attention_gate": "features", "kv_heads": 2},
    "Sub-LN": {"sub_norm": True},
}
POSITIONS = {  # of self-attention alone: rotations for fewer positions than there are, and relative positions
    "rotary, QK-norm": {"rotary": 2, "qk_norm": True},
    "rotary, grouped": {"rotary": 2, "kv_heads": 2},
    "relative 2": {"relative_positions": 2},
    "relative 9": {"relative_positions": 9},
    **{f"relative {clip}, values": {"relative_positions": clip, "relative_values": True, "bias": clip > 1}
       for clip in (1, 3)},
}  # fmt: skip
# each with masks and products of all kinds, and with a kind of padding in turn
SELF = [(kind, causal, products, [*PADDING][(place + number) % 4])
        for place, kind in enumerate((*KINDS, *POSITIONS)) for number, (causal, products) in enumerate(
            itertools.product([False, "mask", "flag"], ["plain", "fused", "weights"]))]  # fmt: skip


def make(kdim=None, causal=False, bias=True, rotary=None, **options):
    positions = {} if rotary is None else {"positions": "rotary", "max_positions": rotary}
    return randomise(MultiheadAttention(Stack(1, C, heads=H, **positions, **options), kdim, causal, bias).double())


def padding_mask(kind, length=T):
    mask = torch.zeros(B, length, dtype=torch.bool)
    for sentence, columns in enumerate(PADDING[kind], start=1):
        mask[sentence, [column for column in columns if column < length]] = True
    return mask if kind != "none" else None


def future_mask(length=T):
    return torch.full((length, length), float("-inf"), **DOUBLE).triu(1)


def naive(module, query, memory=None, padding=None, causal=False, clip=None, rotary=None):
    def visible(b, i, j):
        return not (causal and j > i) and not (padding is not None and padding[b, j])

    relative = [None if table is None else relative_vector(table, clip, bool(causal))
                for table in (module.relative_keys, module.relative_values)]  # fmt: skip
    options = {name: None if part is None else part.weight for name, part in (
        ("q_norm", module.q_norm), ("k_norm", module.k_norm), ("gate", module.gate))}  # fmt: skip
    options.update(rotary=rotary, output_norm=module.output_norm)
    memory = query if memory is None else memory
    return naive_attention(query, memory, projections(module), H, visible, *relative, options)


@pytest.mark.parametrize("kind, causal, products, padding", SELF, ids=str)
def test_self_attention_equals_the_equations(kind, causal, products, padding):
    """With boolean masks, and with the bias and the flag that replace them in the layers of a model.

    Training has plain products on a CPU, evaluation has fused ones.
    """
    options = {**KINDS, **POSITIONS}[kind]
    module, clip = make(**options, causal=bool(causal)).train(products == "plain"), options.get("relative_positions")
    padding, need_weights = padding_mask(padding), products == "weights"
    if clip is not None:
        assert module.relative_keys.shape == (clip + 2 if causal else 2 * clip + 1, C // H)
    assert (module.relative_values is not None) is ("relative_values" in options)
    if causal and padding is not None:
        padding[:, 0] = False  # a first query must see a key
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    hidden = padding_bias(padding, torch.float64) if causal == "flag" and padding is not None else padding
    masks = {"causal": True} if causal == "flag" else {"attn_mask": future_mask() if causal else None}
    actual, weights = module(query, key_padding_mask=hidden, need_weights=need_weights, **masks)
    expected, expected_weights = naive(module, query, None, padding, causal, clip, options.get("rotary"))
    assert (weights is not None) is need_weights
    if need_weights:
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)
    near = ROUNDED if need_weights or "rotary" in options else NEAR
    assert_same(actual, expected, [query, *module.parameters()], **near)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kdim", [None, KDIM], ids=["one width", "another width"])
@pytest.mark.parametrize("padding, need_weights", [("none", True), ("left", False), ("right", True), ("right", False)])
def test_attention_to_a_memory_equals_the_equations(kind, kdim, padding, need_weights):
    module, padding = make(**KINDS[kind], kdim=kdim), padding_mask(padding, S)
    assert module.k_proj.in_features == module.v_proj.in_features == (kdim or C)
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    memory = torch.randn(S, B, kdim or C, requires_grad=True, **DOUBLE)
    actual, weights = module(query, memory, key_padding_mask=padding, need_weights=need_weights)
    expected, expected_weights = naive(module, query, memory, padding)
    if need_weights:
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)
    assert_same(actual, expected, [query, memory, *module.parameters()], **(ROUNDED if need_weights else NEAR))


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_dropout_acts_on_the_weights_in_training_only(need_weights):
    """Values of one, projected by nothing: the output is the sum of the weights that are left, doubled."""
    module = MultiheadAttention(Stack(1, 2, attention_dropout=0.5), bias=False)
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


def test_training_rounds_alike_with_and_without_gradients():
    """Recomputation trusts in it: its first pass has no gradients, its second one has."""
    attention, x = MultiheadAttention(Stack(1, 16, heads=2, attention_dropout=0.1)), torch.randn(30, 3, 16)
    found = []
    for wanted in (False, True):
        torch.manual_seed(1)
        with torch.set_grad_enabled(wanted):
            found.append(attention(x, causal=True)[0])
    assert torch.equal(*found)
