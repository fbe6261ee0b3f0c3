"""Decoders with every --decoder-attn: dropout, states of decoding, padding in steps.

Their equations are proven in ``test_whole_models.py`` and ``test_luna.py``, initial values in ``test_inits.py``.
"""

import pytest
import torch

from fairseq_deep.core.layers import LayerContext
from tests.helpers.decoder_attention import KINDS, LUNA, STACKS, make_model
from tests.helpers.invariances import NEAR
from tests.helpers.models import POSTNORM, make_batch

PAD, C, LAYERS = 1, 16, 3
SHALLOW = [(kind, stack) for kind in KINDS for stack in ("postnorm", "lstm") if "ffn" not in kind or stack != "lstm"]
SHALLOW.remove(("ssru", "lstm"))
HELD = {"running_sum": "vector", "recurrent_state": "vector", "luna_means": "vector", "target": "cache"}


@pytest.mark.parametrize("kind, stack", SHALLOW)
def test_dropout_is_once_on_each_sublayer(kind, stack, build):
    """In a depth-wise LSTM, whose layers are their attentions, on the sum of both if they are merged."""
    name, flags = STACKS[stack]
    layer, seen = build(name, dim=64, dropout=0.5, **flags, **KINDS[kind]).decoder.layers[0].train(), []
    layer.dropout_module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    layer(torch.randn(6, 4, 64), LayerContext(torch.randn(5, 4, 64), mask=torch.zeros(6, 6)))
    assert len(seen) == (1 if kind.startswith("merged") else 2) + (stack == "postnorm")
    for whole, dropped in seen:
        alive = whole != 0  # after a ReLU, some are not
        kept = dropped[alive] != 0
        assert alive.float().mean() > 0.3 and 0.3 < kept.float().mean() < 0.7
        torch.testing.assert_close(dropped[alive][kept], 2 * whole[alive][kept])


def test_attention_dropout_does_not_act_on_the_mean(build):
    layer = build(POSTNORM, attention_dropout=1.0, decoder_attn="merged").decoder.layers[0].train()
    x, memory, attend = torch.randn(6, 4, C), torch.randn(5, 4, C), layer.encoder_attn
    context = LayerContext(memory, mask=torch.zeros(6, 6))
    output, _ = layer.branch("merged", x, context)
    torch.testing.assert_close(output, attend.out_proj(layer.mean(attend.v_proj(x))), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(layer.eval().branch("merged", x, context)[0], output, atol=0.1)


def steps(model, encoder_out, target, state=None):
    """The scores of the last position of each step."""
    state = {} if state is None else state
    for step in range(1, target.size(1) + 1):
        yield model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)[0][:, -1]


@pytest.mark.parametrize("kind", ["self", "average", "merged", "merged-average", "ssru", "luna"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_left_padding_is_not_counted_in_steps(kind, grad, build, dictionary):
    """fairseq's positions do count it in steps, therefore the model has none."""
    model = make_model(build, kind, "postnorm", no_token_positional_embeddings=True).eval()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    target[0] = torch.cat([torch.full((2,), PAD), target[0, :4]])
    with torch.set_grad_enabled(grad):
        encoder_out = model.encoder(source, lengths)
        full = model.decoder(target, encoder_out=encoder_out)[0]
        for step, last in enumerate(steps(model, encoder_out, target)):
            words = target[:, step].ne(PAD)
            torch.testing.assert_close(last[words], full[words, step], **NEAR)


@pytest.mark.parametrize("kind, stack", [*SHALLOW, ("luna", "postnorm")])
@torch.no_grad()
def test_the_state_without_self_attention_does_not_grow(kind, stack, build, dictionary):
    """Of each hypothesis and layer: C numbers for means or a recurrence, two means of C x l for Luna."""
    model, state, held = make_model(build, kind, stack).eval(), {}, []
    source, lengths, target = make_batch(dictionary, target_lengths=(20, 20, 20))
    for _ in steps(model, model.encoder(source, lengths), target, state):
        held.append({part: sum(cache[name].numel() for key, cache in state.items() if key.endswith(part))
                     for part, name in HELD.items()})  # fmt: skip
    own = {"running_sum": "average" in kind or kind == "merged", "recurrent_state": kind == "ssru",
           "luna_means": (kind == "luna") * 2 * LUNA["luna_length"]}  # fmt: skip
    for step, found in enumerate(held, start=1):
        assert found.pop("target") == ("self" in kind) * LAYERS * 3 * 2 * C * step
        assert found == {part: count * LAYERS * 3 * C for part, count in own.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "ffn" not in kind])
@torch.no_grad()
def test_the_source_is_projected_once_per_sentence(kind, build, dictionary):
    """Values of the target in merged attention pass through the same matrix at each step."""
    model = make_model(build, kind, "postnorm").eval()
    source, lengths, target = make_batch(dictionary, lengths=(5, 7), target_lengths=(4, 4))
    calls, order = {"k": [], "v": []}, torch.arange(2).repeat_interleave(4)
    for name, seen in calls.items():
        hook = lambda _, args, output, seen=seen: seen.append(tuple(args[0].shape[:2]))  # noqa: E731
        getattr(model.decoder.layers[1].encoder_attn, f"{name}_proj").register_forward_hook(hook)
    encoder_out = model.encoder.reorder_encoder_out(model.encoder(source, lengths), order)
    assert len(list(steps(model, encoder_out, target[order]))) == 4
    assert calls["k"] == [(7, 2)], "the two sentences, not their eight hypotheses"
    assert sorted(calls["v"]) == sorted([(7, 2), *([(1, 8)] * 4 if kind == "merged" else [])])
