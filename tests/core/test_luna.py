"""Luna: models against one position after the other with every gradient, blocks, padding, precision, initial values."""

import pytest
import torch

from fairseq_deep.core.attention import SharedBeamState, luna_causal
from fairseq_deep.core.attention.luna import LunaAttention, PackedSequence, hidden_rows
from fairseq_deep.core.attention.luna_causal import LunaCausalAttention, causal_means
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.decoder_attention import LUNA, make_model
from tests.helpers.equations import affine, projections, start
from tests.helpers.inits import check_sample
from tests.helpers.models import POSTNORM, make_batch
from tests.helpers.tensors import DOUBLE, assert_same, randomise
from tests.reference import naive_attention, naive_connections, naive_luna
from tests.reference.naive_dlcl import layer_norm
from tests.reference.naive_model import norm

T, B, C, H, L = 7, 3, 8, 2, 3
ENCODER = {name: value for name, value in LUNA.items() if name != "decoder_attn"}


def packs(module):
    """The function of a :class:`Packing`."""
    parts = {name: (getattr(module, f"{name}_proj").weight, getattr(module, f"{name}_proj").bias) for name in "qkv"}
    return lambda p, x: naive_luna.pack(p, x, parts, module.num_heads)


def feed_forward(layer):
    return naive_connections.feed_forward_function(layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)


def naive_encoder(encoder, tokens):
    """p, before the decoder's norm, and the output of a sentence without padding."""
    x, positions = start(encoder, tokens.unsqueeze(0)), naive_luna.sinusoids(*encoder.packed.weight.shape)
    p = naive_luna.start(encoder.packed.weight, positions, len(tokens))
    for layer in encoder.layers:
        attention = layer.self_attn
        own = lambda x, packed, a=attention: naive_luna.unpack(x, packed, projections(a), a.num_heads)  # noqa: E731
        parts = {"pack": packs(attention.pack), "unpack": own, "ffn": feed_forward(layer)}
        parts |= {"x_norm": affine(layer.self_attn_layer_norm), "ffn_norm": affine(layer.final_layer_norm)}
        parts["p_norm"] = affine(layer.packed_layer_norm)
        p, x = naive_luna.encoder_layer(p, x, parts, layer.normalize_before)
    return p, x if encoder.layer_norm is None else layer_norm(x, *affine(encoder.layer_norm))


def naive_decoder(model, tokens, p, source):
    """Scores (T x V) of a sentence without padding."""
    decoder, memory = model.decoder, model.encoder.memory
    pre_norm, x = decoder.layers[0].normalize_before, start(decoder, tokens.unsqueeze(0))
    p = p if memory is None or memory.layer_norm is None else layer_norm(p, *affine(memory.layer_norm))
    chain = [] if memory is None else [(packs(layer.pack), affine(layer.layer_norm)) for layer in memory.layers]
    pairs = naive_luna.memories(p, source, chain, pre_norm) if chain else [(None, source)] * len(decoder.layers)
    for layer, (own, memory) in zip(decoder.layers, pairs):
        first, second = layer.self_attn, layer.encoder_attn
        named = projections(first)
        if chain:
            named |= {name: (getattr(first, f"{name}_proj").weight, getattr(first, f"{name}_proj").bias)
                      for name in ("pq", "pc")}  # fmt: skip
            attend = lambda x, own=own, named=named: naive_luna.causal(x, own, named, 2)  # noqa: E731
        else:
            attend = lambda x, named=named: naive_attention.attention(x, x, named, 2, lambda b, i, j: j <= i)[0]  # noqa: E731
        cross = lambda x, m=memory, a=second: naive_luna.unpack(x, m, projections(a), 2)  # noqa: E731
        functions = [attend, cross, feed_forward(layer)]
        norms = [layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm]
        plain = naive_connections.connect("plain", None)
        x = naive_connections.run_sublayers(x, [(f, plain, norm(n)) for f, n in zip(functions, norms)], pre_norm)
    x = x if decoder.layer_norm is None else layer_norm(x, *affine(decoder.layer_norm))
    return x[:, 0] @ decoder.output_projection.weight.T


@pytest.mark.parametrize(
    "stack, flags, left_pad",
    [("postnorm", LUNA, True), ("prenorm", LUNA, False), ("postnorm", ENCODER, False), ("prenorm", ENCODER, True)],
)
def test_scores_and_gradients_equal_the_equations(flags, stack, left_pad, build, dictionary):
    """Sources padded on either side, one with fewer words than p has rows, and targets padded on the right."""
    model = make_model(build, "self", stack, **flags)
    positions, exact = model.encoder.packed.positions, naive_luna.sinusoids(L, 16)
    torch.testing.assert_close(positions, exact, rtol=0, atol=1e-6)
    positions.copy_(exact)  # which were of fp32
    batch = make_batch(dictionary, lengths=(5, 7, 2), left_pad=left_pad)
    words, expected = batch[2].ne(dictionary.pad()), []
    for source, target in zip(batch[0], batch[2]):
        source, target = source[source.ne(dictionary.pad())], target[target.ne(dictionary.pad())]
        expected.append(naive_decoder(model, target, *naive_encoder(model.encoder, source)))
    actual, expected = model(*batch)[0][words], torch.cat(expected)
    assert_same(actual, expected, dict(model.named_parameters()))


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


@torch.no_grad()
def test_padding_anywhere_in_steps_and_in_blocks(monkeypatch):
    """Its entries have no effect; hypotheses of a sentence share the projection of p."""
    monkeypatch.setattr(luna_causal, "BLOCK", 3)
    module, mask = randomise(causal_attention().double()), torch.zeros(2 * B, T, dtype=torch.bool)
    mask[0, :2] = mask[2, 4:] = mask[3, 2:5] = True
    x, memory = torch.randn(T, 2 * B, C, **DOUBLE), torch.randn(2 * L, B, C, **DOUBLE)
    full = module(x, key_padding_mask=mask, causal=True, memory=memory)[0]
    steps, state = run_in_steps(module, x, memory, ~mask)
    torch.testing.assert_close(steps[~mask.T], full[~mask.T])
    other = x.clone()
    other[mask.T] += 100.0
    changed = module(other, key_padding_mask=mask, causal=True, memory=memory)[0]
    assert torch.equal(changed[~mask.T], full[~mask.T])
    assert state[module.means._state]["vector"].shape == (1, 2 * B, 2 * C * L)
    assert state[module.memory_cache._state]["key"].shape == (B, H, L, C // H)


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


@pytest.mark.parametrize("method", ["fairseq", "xavier", "ds", "lipschitz"])
def test_initial_values(method, build):
    """The entries of p are N(0, 1/d); matrices of "pack" and of the causal attention follow the rule of their layer."""
    model = build(POSTNORM, **LUNA, **{f"{side}_embed_dim": 96 for side in ("encoder", "decoder")}, deep_init=method)
    check_sample("p", torch.cat([PackedSequence(Stack(1, 96), 50).weight for _ in range(4)]), "normal", 96**-0.5)
    places = [(layer.self_attn.pack, "qkv", True) for layer in model.encoder.layers]
    places += [(layer.self_attn, ("q", "k", "v", "pq", "pc"), True) for layer in model.decoder.layers]
    places += [(layer.pack, "qkv", False) for layer in model.encoder.memory.layers]
    for index, (module, names, fused) in enumerate(places):
        bound = (6 / (2 * 96)) ** 0.5 * (0.5**0.5 if fused or method == "fairseq" else 1)
        bound = {"ds": bound * (index % 2 + 1) ** -0.25, "lipschitz": (1 / 96) ** 0.5}.get(method, bound)
        for linear in (getattr(module, f"{name}_proj") for name in names):
            check_sample(str(index), linear.weight, "uniform", bound)
            assert method == "fairseq" or not linear.bias.any()


def test_what_it_cannot_give_is_refused(build, batch):
    model = build(POSTNORM, **LUNA)
    with pytest.raises(UsageError, match="--decoder-attn luna does not see later positions: omit"):
        model.decoder(batch[2], model.encoder(*batch[:2]), full_context_alignment=True)
    with pytest.raises(UsageError, match="--decoder-attn luna has no weights of source words: omit --print-alignment"):
        model.make_generation_fast_(need_attn=True)
