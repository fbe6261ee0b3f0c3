"""Multi-head attention against its equations and torch's own: masks, caches, relative positions, memories."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core.attention import MultiheadAttention, multihead
from tests.helpers.equations import projections
from tests.helpers.models import reorder_all
from tests.helpers.tensors import DOUBLE, assert_same_gradients, randomise
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




@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    "clip, values", [(None, False), (1, False), (2, False), (9, False), (1, True), (3, True)], ids=str
)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_self_attention_equals_the_equations(bias, padding, causal, clip, values, need_weights):
    module = make(bias=bias, relative_positions=clip, relative_values=values, causal=causal)
    table, padding = module.relative_keys, padding_mask(padding)
    if clip is not None:
        assert table.shape == (clip + 2 if causal else 2 * clip + 1, C // H)
    assert (module.relative_values is not None) is values
    assert not values or module.relative_values.shape == table.shape
    if causal and padding is not None:
        padding[:, 0] = False  # a first query must see a key
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    mask = future_mask() if causal else None
    relative = None if clip is None else relative_vector(table, clip, causal)
    value = relative_vector(module.relative_values, clip, causal) if values else None

    actual, weights = module(query, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
    expected, expected_weights = naive(module, query, None, padding, causal, relative, value)
    near = ROUNDED if need_weights else NEAR
    torch.testing.assert_close(actual, expected, **near)
    if need_weights:
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)
    else:
        assert weights is None
    assert_same_gradients(actual, expected, [query, *module.parameters()], **near)


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
    assert_same_gradients(actual, expected, [query, memory, *module.parameters()], **near)


def torchs_own(module, kdim, bias):
    """torch.nn.MultiheadAttention with copies of the weights of *module*."""
    theirs = torch.nn.MultiheadAttention(C, H, bias=bias, kdim=kdim, vdim=kdim).double()
    with torch.no_grad():
        ours = (module.q_proj, module.k_proj, module.v_proj)
        if kdim is None:
            theirs.in_proj_weight.copy_(torch.cat([proj.weight for proj in ours]))
        else:
            for name, proj in zip("qkv", ours):
                getattr(theirs, f"{name}_proj_weight").copy_(proj.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([proj.bias for proj in ours]))
            theirs.out_proj.bias.copy_(module.out_proj.bias)
        theirs.out_proj.weight.copy_(module.out_proj.weight)
    return theirs


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kdim", [None, KDIM])
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_it_equals_torchs_own(bias, kdim, padding, need_weights):
    """Self-attention with a causal mask, and attention to a memory of another width; forward and gradients."""
    module = make(bias=bias, kdim=kdim)
    theirs = torchs_own(module, kdim, bias)
    query = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    memory = None if kdim is None else torch.randn(S, B, kdim, requires_grad=True, **DOUBLE)
    mask = future_mask().bool() if memory is None else None
    keys, padding = query if memory is None else memory, padding_mask(padding, T if memory is None else S)
    want, want_weights = theirs(
        query, keys, keys, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False
    )
    mask = None if mask is None else future_mask()
    got, weights = module(query, memory, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
    near = ROUNDED if need_weights else NEAR
    torch.testing.assert_close(got, want, **near)
    if need_weights:
        torch.testing.assert_close(weights.double(), want_weights.transpose(0, 1), rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(want)
    sources = [query] if memory is None else [query, memory]
    want_grads = torch.autograd.grad(want, [*sources, *theirs.parameters()], direction)
    got_grads = torch.autograd.grad(got, [*sources, *module.parameters()], direction)
    for want, got in zip(want_grads, got_grads[: len(sources)]):
        torch.testing.assert_close(got, want, **near)
    wanted = dict(zip([name for name, _ in theirs.named_parameters()], want_grads[len(sources) :]))
    gotten = dict(zip([name for name, _ in module.named_parameters()], got_grads[len(sources) :]))
    for part in ("weight", "bias") if bias else ("weight",):
        joined = wanted.get(f"in_proj_{part}")
        parts = joined.chunk(3) if joined is not None else [wanted[f"{name}_proj_weight"] for name in "qkv"]
        for name, want in zip("qkv", parts):
            torch.testing.assert_close(gotten[f"{name}_proj.{part}"], want, **near)
        torch.testing.assert_close(gotten[f"out_proj.{part}"], wanted[f"out_proj.{part}"], **near)


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


def step_by_step(module, query, start, padding=None, attn_mask=None):
    """Outputs of *start* positions at once and then one at a time, with caches; and the caches."""
    caches, outputs = {}, []
    for begin, end in [(0, start), *((i, i + 1) for i in range(start, len(query)))]:
        mask = None if attn_mask is None or end - begin == 1 else attn_mask[begin:end, :end]
        new = None if padding is None else padding[:, :end]
        outputs.append(module(query[begin:end], None, new, mask, incremental_state=caches)[0])
    return torch.cat(outputs), caches


@pytest.mark.parametrize("start, padding", [(1, "none"), (1, "right"), (1, "middle"), (3, "middle"), (3, "left")])
@pytest.mark.parametrize("clip", [None, 1, 3], ids=lambda clip: f"K={clip}")
def test_incremental_equals_full(padding, clip, start):
    """The mask is that of the new positions; some can be given at once, as they must where the first are padding."""
    module, padding = make(relative_positions=clip, causal=True).eval(), padding_mask(padding)
    query = torch.randn(T, B, C, **DOUBLE)
    mask = future_mask().clamp(min=-1e4)  # as the decoder has it, so that rows of padding do not become NaN
    full = module(query, None, padding, mask)[0]
    stepped, caches = step_by_step(module, query, start, padding, mask)
    real = slice(None) if padding is None else ~padding.T
    torch.testing.assert_close(stepped[real], full[real], **NEAR)
    (key, cache), = caches.items()
    assert key.endswith("target")
    assert cache["cache"].shape == (2, B, H, T, C // H)


def test_incremental_attention_to_a_memory_computes_its_keys_once():
    module = make(kdim=KDIM).eval()
    query, memory = torch.randn(T, B, C, **DOUBLE), torch.randn(S, B, KDIM, **DOUBLE)
    padding, caches, calls = padding_mask("left", S), {}, []
    module.k_proj.register_forward_hook(lambda *_: calls.append("k"))
    module.v_proj.register_forward_hook(lambda *_: calls.append("v"))
    full = module(query, memory, padding)[0]
    del calls[:]
    steps = [module(query[i : i + 1], memory, padding, incremental_state=caches)[0] for i in range(T)]
    torch.testing.assert_close(torch.cat(steps), full, **NEAR)
    assert calls == ["k", "v"]


@pytest.mark.parametrize("kdim", [None, KDIM], ids=["self", "memory"])
@pytest.mark.parametrize("padding", ["none", "middle"])
def test_caches_follow_a_scrambled_beam(kdim, padding):
    module, half = make(kdim=kdim, relative_positions=None if kdim else 2, causal=True).eval(), T // 2
    order = torch.tensor([2, 0, 0])
    query, padding = torch.randn(T, B, C, **DOUBLE), padding_mask(padding, S if kdim else T)
    memory = torch.randn(S, B, KDIM, **DOUBLE) if kdim else None
    caches = {"another": {"prev_key": torch.arange(3)}}

    def attend(i, memory, padding):
        new = padding if kdim or padding is None else padding[:, : i + 1]
        return module(query[i : i + 1], memory, new, incremental_state=caches)[0]

    for i in range(half):
        attend(i, memory, padding)
    reorder_all(module, caches, order)
    assert torch.equal(caches.pop("another")["prev_key"], torch.arange(3)), "other caches are left alone"
    query[:half] = query[:half, order]
    if padding is not None:
        padding = torch.cat([padding[order][:, :half], padding[:, half:]], dim=1) if kdim is None else padding[order]
    memory = memory[:, order] if kdim else None
    mask = None if kdim else future_mask()
    full = module(query, memory, padding, mask)[0]
    torch.testing.assert_close(torch.cat([attend(i, memory, padding) for i in range(half, T)]), full[half:], **NEAR)


def test_attentions_have_caches_of_their_own():
    one, other, caches = make().eval(), make().eval(), {}
    query = torch.randn(1, B, C, **DOUBLE)
    one(query, incremental_state=caches)
    kept = {key: dict(cache) for key, cache in caches.items()}
    reorder_all(other, caches, torch.tensor([0, 0, 0]))
    assert caches == kept
    torch.testing.assert_close(other(query, incremental_state=caches)[0], other(query)[0])
    assert len(caches) == 2


@pytest.mark.parametrize(
    "causal, expected",
    [
        (False, [[3, 5, 5, 5], [2, 3, 5, 5], [2, 2, 3, 5], [2, 2, 2, 3]]),
        (True, [[5, 0, 0, 0], [3, 5, 0, 0], [2, 3, 5, 0], [2, 2, 3, 5]]),
    ],
)
def test_distances_beyond_the_clip_share_a_vector(causal, expected):
    """K = 1; queries of ones and no keys, so that the vectors alone make weights, here in proportion 2 : 3 : 5."""
    module = make(relative_positions=1, causal=causal)
    with torch.no_grad():
        for proj, bias in ((module.q_proj, 1.0), (module.k_proj, 0.0)):
            proj.weight.zero_()
            proj.bias.fill_(bias)
        scores = torch.tensor([2.0, 3.0, 5.0], **DOUBLE).log()
        module.relative_keys.copy_((scores * module.head_dim**-0.5)[:, None].expand_as(module.relative_keys))
    mask = future_mask(4) if causal else None
    weights = module(torch.randn(4, 1, C, **DOUBLE), attn_mask=mask, need_weights=True)[1]
    expected = torch.tensor(expected) / torch.tensor(expected).sum(-1, keepdim=True)
    for head in range(H):
        torch.testing.assert_close(weights[head, 0], expected)


def test_start_values_are_fairseqs():
    dim = 64
    for kdim, gain in ((None, 2**-0.5), (96, 1.0)):
        module = MultiheadAttention(dim, 4, kdim=kdim, relative_positions=20)
        for proj in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
            bound = (6 / sum(proj.weight.shape)) ** 0.5 * (1.0 if proj is module.out_proj else gain)
            assert 0.97 * bound < proj.weight.abs().max() <= bound
        assert module.out_proj.bias.eq(0).all()
        bound = (6 / sum(module.relative_keys.shape)) ** 0.5
        assert 0.97 * bound < module.relative_keys.abs().max() <= bound
        assert not [p for p in MultiheadAttention(dim, 4, bias=False).parameters() if p.dim() == 1]


def test_functional_form_of_torch_agrees():
    """The plain softmax(q k^T / sqrt(D)) v of torch's functional form, with the bias-free projections of the LSTM."""
    module = make(bias=False)
    query = torch.randn(T, B, C, **DOUBLE)
    want, _ = F.multi_head_attention_forward(
        query, query, query, C, H, None, None, None, None, False, 0.0, module.out_proj.weight, None,
        training=False, attn_mask=future_mask(), use_separate_proj_weight=True, q_proj_weight=module.q_proj.weight,
        k_proj_weight=module.k_proj.weight, v_proj_weight=module.v_proj.weight,
    )  # fmt: skip
    torch.testing.assert_close(module(query, attn_mask=future_mask())[0], want, **NEAR)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [15, 16, 30, 129])
def test_plain_products_in_training_are_the_fused_form(causal, padded, length, monkeypatch):
    torch.manual_seed(3)
    attention = MultiheadAttention(8, 2).double()
    x = torch.randn(length, 3, 8, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(3, length, dtype=torch.bool)
    padding[1, -2:] = True
    found = []
    for plain in (multihead.trains_plainly, lambda q, keys: False):
        monkeypatch.setattr(multihead, "trains_plainly", plain)
        y, _ = attention(x, key_padding_mask=padding if padded else None, causal=causal)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])])
    torch.testing.assert_close(*found)


def test_training_rounds_alike_with_and_without_gradients():
    """Recomputation trusts in it: its first pass has no gradients, its second one has."""
    attention, x = MultiheadAttention(16, 2, dropout=0.1), torch.randn(30, 3, 16)
    found = []
    for wanted in (False, True):
        torch.manual_seed(1)
        with torch.set_grad_enabled(wanted):
            found.append(attention(x, causal=True)[0])
    assert torch.equal(*found)
