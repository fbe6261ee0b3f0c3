"""Luna: blocks of positions, empty sentences, precision, dropout, refusals; its equations: ``test_whole_models.py``."""

import pytest
import torch

from fairseq_deep.core.attention import SharedBeamState, luna_causal
from fairseq_deep.core.attention.luna import LunaAttention, PackedSequence, hidden_rows
from fairseq_deep.core.attention.luna_causal import LunaCausalAttention, causal_means
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.decoder_attention import LUNA, make_model
from tests.helpers.models import POSTNORM, make_batch
from tests.helpers.tensors import DOUBLE, assert_same, randomise

T, B, C, H, L = 7, 3, 8, 2, 3


def test_an_empty_sentence_is_finite(build, dictionary):
    model = make_model(build, "luna", "postnorm").eval()
    model.encoder.packed.weight.data.normal_()
    assert hidden_rows(torch.tensor([[False, True], [True, True]]), 3).tolist() == [[False, True, True], [True] * 3]
    source, lengths, target = make_batch(dictionary, lengths=(2, 9), target_lengths=(4, 6))
    source[1] = dictionary.pad()
    assert model(source, lengths, target)[0].isfinite().all()


def running_means(x, y, z, count):
    total, rows = 0, []
    for t in range(x.size(2)):
        total = total + y[:, :, t, :, None] * z[:, :, t, None, :]
        rows.append((x[:, :, t, None] @ total)[:, :, 0] / count[:, :, t])
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiling"])
@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_blocks_equal_running_sums(length, compiles, monkeypatch):
    monkeypatch.setattr(luna_causal, "BLOCK", 2)
    monkeypatch.setattr(luna_causal, "is_compiling", lambda: compiles)
    sizes = (B, H, length)
    x, y, z = (torch.randn(*sizes, width, requires_grad=True, **DOUBLE) for width in (4, 4, 3))
    count = torch.tensor([0, 1, 1, 0, 1, 1][:length], **DOUBLE).cumsum(0).clamp(min=1).view(1, 1, -1, 1)
    expected, actual = running_means(x, y, z, count), causal_means(x, y, z, count)
    assert_same(actual, expected, [x, y, z])


def causal_attention(dim=C):
    return LunaCausalAttention(Stack(1, dim, side="decoder", heads=H), True, L)


def run_in_steps(module, x, memory, words=None):
    words = torch.ones(x.size(1), len(x), dtype=torch.bool) if words is None else words
    state, beams, outputs = {}, SharedBeamState(attends=False, averages=True), []
    for t in range(len(x)):
        step = beams(state, memory.size(1), x[t : t + 1], words[:, t : t + 1])
        outputs.append(module(x[t : t + 1], incremental_state=state, step=step, memory=memory)[0])
    return torch.cat(outputs), state


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_half_precision_holds_what_a_sum_would_not(dtype):
    """Products of 20,000 at each of 300 positions: means of them fit into fp16. State and carried sums are in fp32."""
    module = causal_attention(64).to(dtype)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(module, name).weight.copy_(60.0 * torch.eye(64))
    x, memory = 1.0 + 0.1 * torch.randn(300, 2, 64), torch.randn(2 * L, 2, 64)
    exact = causal_attention(64).double()
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    wanted = exact(x.to(dtype).double(), causal=True, memory=memory.to(dtype).double())[0]
    full = module(x.to(dtype), causal=True, memory=memory.to(dtype))[0]
    steps, state = run_in_steps(module, x.to(dtype), memory.to(dtype))
    assert full.dtype == steps.dtype == dtype
    assert state[module.means._state]["vector"].dtype == torch.float32
    for got in (full, steps):
        assert got.isfinite().all()
        assert (got.double() - wanted).abs().mean() < 0.05 * wanted.abs().mean()


@torch.no_grad()
def test_dropout_is_on_weights_of_all_products():
    """Where all are dropped, the biases of the output are left, and p~ is 0."""
    encoder = Stack(1, C, heads=H, attention_dropout=1.0)
    pair = randomise(LunaAttention(encoder, L).train())
    out = pair(torch.randn(L + T, B, C))[0]
    assert not out[:L].any() and torch.equal(out[L:], pair.out_proj.bias.expand(T, B, C))
    module = randomise(causal_attention().train())
    module.dropout_module.p = 1.0
    assert torch.equal(module(torch.randn(T, B, C), causal=True, memory=torch.randn(2 * L, B, C))[0],
                       module.out_proj.bias.expand(T, B, C))  # fmt: skip
    p = PackedSequence(Stack(1, C, dropout=0.5), 400).train()(2)
    assert 0.4 < p[:, 0].eq(0).double().mean() < 0.6 and not torch.equal(p[:, 0], p[:, 1])


def test_what_it_cannot_give_is_refused(build, batch):
    model = build(POSTNORM, **LUNA)
    with pytest.raises(UsageError, match="--decoder-attn luna does not see later positions: omit"):
        model.decoder(batch[2], model.encoder(*batch[:2]), full_context_alignment=True)
    with pytest.raises(UsageError, match="--decoder-attn luna has no weights of source words: omit --print-alignment"):
        model.make_generation_fast_(need_attn=True)
