"""Gradient norms, variance and gradient ratios, stream widths and source gain, against formulas by hand."""

import math

import pytest
import torch

from fairseq_deep.core.diagnostics import (
    source_gain,
    stream_statistics,
    sublayer_ratios,
)
from fairseq_deep.core.registry import UsageError
from tests.helpers.equations import start
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import PRENORM as PRE
from tests.helpers.models import TINY, make_batch
from tests.helpers.residuals import PLACED, flags_of
from tests.helpers.tensors import shake

PARTS = {"encoder": ["self", "ffn"], "decoder": ["self", "cross", "ffn"]}
DLCL, LSTM = "transformer_dlcl_2l2l_tiny", "transformer_lstm_2l2l_tiny"


def loss_of(model, batch, seed=1):
    scores = model(*batch)[0]
    generator = torch.Generator().manual_seed(seed)
    return (scores * torch.randn(scores.shape, generator=generator)).sum()


def paddings(model, batch):
    pad = model.encoder.padding_idx
    return {"encoder": batch[0].eq(pad), "decoder": batch[2].eq(pad)}


def words_of(model, batch):
    return {side: ~padding.T for side, padding in paddings(model, batch).items()}


def measure(model, batch, loss=None):
    return sublayer_ratios(model, paddings(model, batch), loss or (lambda: loss_of(model, batch)))


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind, ())) for module in model.modules() for kind in kinds)


# --- ratios ---

CONNECTIONS = {f"{norm} {form}": (TINY[norm], flags_of(form)) for form, norm in PLACED if " " not in form}
STARTS = (("post", "xavier"), ("pre", "xavier"), ("post", "deepnet"), ("post", "admin"),
          ("post", "tfixup"), ("post", "rezero"))  # fmt: skip
CONNECTIONS |= {f"{norm} {init}": (TINY[norm], {"deep_init": init}) for norm, init in STARTS}
CONNECTIONS |= {"merged": (POST, {"decoder_attn": "merged"}),
                "Luna": (POST, {"encoder_attn": "luna", "decoder_attn": "luna"})}  # fmt: skip


@pytest.mark.parametrize("name, flags", CONNECTIONS.values(), ids=CONNECTIONS)
def test_ratios_of_every_sublayer_equal_the_papers_equations(name, flags, build, dictionary):
    """Eq. (10) to (14) of z, r and o = LN(r); d_z is the gradient at the sub-layer's input through that one only.

    Where there is no norm, there is no beta_LN. Luna's encoder has its packed sequence before the words.
    """
    batch, calls = make_batch(dictionary, target_lengths=(6, 6, 6)), []
    model = shake(build(name, **flags).train(), 0.3)

    def connect(residual, inputs, r):
        r.retain_grad()
        calls.append({"z": inputs[0], "r": r})

    def normalise(norm, inputs, o):
        if calls and inputs[0] is calls[-1]["r"]:
            o.retain_grad()
            calls[-1]["o"] = o

    layers = [*model.encoder.layers, *model.decoder.layers]
    handles = [layer.residual.register_forward_hook(connect) for layer in layers]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    handles += [norm.register_forward_hook(normalise) for norm in norms]
    loss_of(model, batch).backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    measured, words = measure(model, batch), words_of(model, batch)
    parts = PARTS if flags.get("decoder_attn") != "merged" else {**PARTS, "decoder": ["merged", "ffn"]}
    places = [(side, number, part) for side in PARTS for number in (1, 2) for part in parts[side]]
    found = [(side, ratios) for side in PARTS for ratios in measured[side]]
    assert [(side, got.layer, got.part) for side, got in found] == places
    for place, (side, got), call in zip(places, found, calls):
        z, r, d_r = call["z"], call["r"], call["r"].grad.clone()
        centred = r.detach() - r.detach().mean(-1, keepdim=True)
        d_z = torch.autograd.grad(r, z, d_r, retain_graph=True)[0]
        of_words = (centred**2).mean(-1)[-len(words[side]) :][words[side]]
        assert got.variance == pytest.approx(float(of_words.mean()), rel=1e-3), place
        if flags.get("decoder_attn") == "luna":  # whose first sub-layer is also of the packed sequence
            continue
        assert got.beta_rc == pytest.approx(float(d_z.norm() / d_r.norm()), rel=1e-3), place
        if getattr(model, side).layers[got.layer - 1].normalize_before or "o" not in call:
            assert got.beta_ln is None and got.beta == got.beta_rc, place
        else:
            assert got.beta_ln == pytest.approx(float(d_r.norm() / call["o"].grad.norm()), rel=1e-3), place
            assert got.beta == pytest.approx(got.beta_rc * got.beta_ln), place


@pytest.mark.parametrize("name", [POST, PRE])
def test_other_uses_of_an_input_do_not_count_and_no_trace_is_left(name, build, batch):
    """As with aggregators: here the loss sees what goes into the second layer, whose ratio stays."""
    model = build(name, deep_init="xavier").train()
    before, hooked = model(*batch)[0], hooks(model)

    def run(weight):
        encoder_out = model.encoder(*batch[:2], return_all_hiddens=True)
        scores = model.decoder(batch[2], encoder_out=encoder_out)[0]
        return scores.square().sum() + weight * (encoder_out["encoder_states"][1] ** 3).sum()

    alone, again, seen = (measure(model, batch, lambda w=w: run(w))["encoder"] for w in (0.0, 0.0, 10.0))
    assert again == alone, "whatever gradients there are"
    assert (seen[2].layer, seen[2].part) == (2, "self")
    assert seen[2].beta_rc == pytest.approx(alone[2].beta_rc, rel=1e-5)
    assert seen[1].beta_rc != pytest.approx(alone[1].beta_rc, rel=1e-3)
    assert hooks(model) == hooked and torch.equal(model(*batch)[0], before)


def test_a_stack_without_residual_connections_is_left_out(build, batch):
    model = build(LSTM, encoder_layer_agg="residual", encoder_ffn_embed_dim=32).train()
    found = measure(model, batch)
    assert [ratios.part for ratios in found["encoder"]] == ["self", "ffn"] * 2 and found["decoder"] == []


def interrupted(model, batch):
    raise KeyboardInterrupt


REFUSED = [
    (LSTM, {}, UsageError, "no residual connections"),
    (POST, {"no_cross_attention": True}, UsageError, "does not affect the loss"),
    (POST, {"encoder_layerdrop": 1.0}, UsageError, "does not affect the loss"),
    (POST, {"checkpoint_activations": True}, UsageError, "omit --checkpoint-activations"),
    (POST, {"grad": False}, UsageError, "call outside no_grad"),
    (POST, {"loss": interrupted}, KeyboardInterrupt, None),
]


@pytest.mark.parametrize("name, flags, error, words", REFUSED, ids=[str(row[-1]) for row in REFUSED])
def test_what_cannot_be_measured_is_refused_and_no_hook_stays(name, flags, error, words, build, batch):
    loss, grad = flags.get("loss", loss_of), flags.get("grad", True)
    model = build(name, **{key: value for key, value in flags.items() if key not in ("loss", "grad")}).train()
    hooked = hooks(model)
    with pytest.raises(error, match=words), torch.set_grad_enabled(grad):
        measure(model, batch, lambda: loss(model, batch))
    assert hooks(model) == hooked


# --- streams and the source ---


@pytest.mark.parametrize("name", [POST, PRE, DLCL])
def test_std_and_share_between_positions_of_every_stream(name, build, batch):
    """Of what each layer returns, y_0 first, without padding."""
    model = shake(build(name).eval(), 0.4)
    source, lengths, target = batch
    outputs, words = {side: [] for side in PARTS}, words_of(model, batch)
    for side, kept in outputs.items():
        stack = getattr(model, side)
        kept.append(start(stack, source if side == "encoder" else target).detach())
        for layer in stack.layers:
            layer.register_forward_hook(lambda _, inputs, output, kept=kept: kept.append(output[0]))
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    streams = stream_statistics(model, net_input, model.encoder.padding_idx)
    for side, kept in outputs.items():
        values = [state[words[side]].double() for state in kept]
        expected = [math.sqrt(float(((value - value.mean()) ** 2).mean())) for value in values]
        assert len(expected) == 3 and streams["std"][side] == pytest.approx(expected, rel=5e-3)
        shares = []
        for state, std in zip(kept, expected):
            sentences = [state[words[side][:, column], column].double() for column in range(state.size(1))]
            squares = torch.cat([(sentence - sentence.mean(0)) ** 2 for sentence in sentences])
            shares.append(float(squares.mean()) / std**2)
        assert streams["between"][side] == pytest.approx(shares, rel=1e-4)


def test_source_gain_is_what_the_true_source_is_worth(build, batch):
    """Nothing for a model that cannot see it; for others the loss with the sentence before, less that with the own."""
    source, lengths, target = batch
    model = shake(build(PRE).train(), 0.4)
    inputs = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": target.roll(-1, 1)}
    pad = model.encoder.padding_idx
    gain = source_gain(model, sample, pad)
    assert model.training
    model.eval()
    losses = []
    for order in ([*range(len(source))], [len(source) - 1, *range(len(source) - 1)]):
        scores = model(source[order], lengths[order], target)[0].double().log_softmax(-1)
        words = sample["target"].ne(pad)
        losses.append(-float(scores[words].gather(1, sample["target"][words].unsqueeze(1)).detach().mean()))
    assert gain == pytest.approx(losses[1] - losses[0], abs=1e-5) and abs(gain) > 1e-3
    for layer in model.decoder.layers:
        torch.nn.init.zeros_(layer.encoder_attn.out_proj.weight)
    assert source_gain(model, sample, pad) == pytest.approx(0, abs=1e-6)
    one = {"net_input": {name: value[:1] for name, value in inputs.items()}, "target": target[:1]}
    with pytest.raises(ValueError, match="at least two sentences"):
        source_gain(model, one, pad)
