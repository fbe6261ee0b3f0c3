"""Whole models against their equations: scores and every gradient, for all decoder attentions, LSTMs, initialisations.

The other aggregators are in ``test_aggregators.py``, memories in ``test_memories.py``, Luna in ``test_luna.py``.
"""

import argparse

import pytest
import torch

from fairseq_deep.core.aggregators.lstm import GLU
from fairseq_deep.core.attention import DECODER_ATTENTIONS
from tests.helpers.decoder_attention import KINDS, LUNA, STACKS, assert_same_gradients
from tests.helpers.equations import affine, projections, start
from tests.helpers.lstm import named_steps
from tests.helpers.methods import LSTM
from tests.helpers.models import POSTNORM, PRENORM, make_batch
from tests.helpers.tensors import randomise, shake
from tests.reference import naive_average, naive_connections, naive_ssru
from tests.reference.naive_attention import attention, relative_vector
from tests.reference.naive_dlcl import layer_norm, run_stack
from tests.reference.naive_lstm import run_decoder, run_encoder

PAD = 1


def is_parallel(kind):
    return kind.startswith("merged")


def attentions(own, cross, kind, memory, masks, clip=None):
    """F of the attentions of a layer, one or two; *masks*: what sees a source, what sees earlier words, means."""
    seen, earlier, means = masks

    def attend(module, keys, visible, causal=False):
        relative = None if keys is not None or clip is None else relative_vector(module.relative_keys, clip, causal)
        named = projections(module)
        return lambda x: attention(x, x if keys is None else keys, named, module.num_heads, visible, relative)[0]

    if cross is None:
        return [attend(own, None, seen) if memory is None else attend(own, None, earlier, True)]
    to_memory = (projections(cross), cross.num_heads, seen)
    if kind == "merged":
        return [lambda x: naive_average.merged(x, memory, *to_memory, means)]
    if "average" in kind:
        linears = [own.fc1, own.fc2] if "ffn" in kind else []
        ffn = [part for linear in linears for part in (linear.weight, linear.bias)]
        gate = (own.gate.weight, own.gate.bias)
        first = lambda x: naive_average.average_attention(x, means, gate, ffn or None)  # noqa: E731
        if is_parallel(kind):
            return [lambda x: naive_average.merged_average(x, memory, first, *to_memory)]
    elif kind == "ssru":
        words, gate = means.diagonal(dim1=1, dim2=2) > 0, (own.gate.weight, own.gate.bias)
        first = lambda x: naive_ssru.ssru(x, words, gate, own.input_proj.weight)  # noqa: E731
    elif is_parallel(kind):
        return [lambda x: naive_average.merged_self(x, memory, projections(own), *to_memory, earlier)]
    else:
        first = attend(own, None, earlier, True)
    return [first, attend(cross, memory, seen)]


def sublayers(layer, kind, *context):
    """The pairs (F, LN) of a *layer*; a layer without a feed-forward sub-layer has only attentions."""
    own, cross = getattr(layer, "self_attn", None), getattr(layer, "encoder_attn", None)
    names = ["encoder_attn"] if cross and is_parallel(kind) else ["self_attn"] + ["encoder_attn"] * bool(cross)
    norms = [affine(getattr(layer, f"{name}_layer_norm", None)) for name in names]
    found = list(zip(attentions(own, cross, kind, *context), norms))
    if hasattr(layer, "fc1"):
        matrices = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
        found.append((naive_connections.feed_forward_function(*matrices), affine(layer.final_layer_norm)))
    return found


def naive_layer(layer, stack, init, kind, *context):
    """A layer of residual connections as a function of its input."""
    pairs, weight = sublayers(layer, kind, *context), getattr(layer.residual, "weight", None)
    alpha = naive_connections.deepnet_alpha(stack.side, stack.encoder_layers, stack.decoder_layers)
    method = init if init in ("deepnet", "admin", "rezero") else "plain"
    factors = [{"deepnet": alpha, "rezero": weight, "admin": weight is not None and weight[min(index, len(weight) - 1)],
                "plain": None}[method] for index in range(len(pairs))]  # fmt: skip
    connected = [(f, naive_connections.connect(method, factor), norm) for (f, norm), factor in zip(pairs, factors)]
    return lambda x: naive_connections.run_sublayers(x, connected, stack.pre_norm)


def naive_depthwise(stack, x, kind, context, merge="add", attn_residual=True, share=None, glu="sigmoid"):
    """Output of a stack whose layers are only attentions of normalised queries."""
    places = 2 if stack.stack.side == "decoder" and merge == "two" else 1
    share = share or ("gate" if len(stack.aggregator.gates) else "none")
    steps, final = named_steps(stack.aggregator, share, places), affine(stack.aggregator.final_norm)
    layers, functions = list(stack.layers), []
    for first, last in zip(layers[::places], layers[places - 1 :: places]):
        whole = argparse.Namespace(**{**first._modules, **last._modules})
        pairs = sublayers(whole, kind, *context)
        functions.append([lambda x, f=f, norm=norm: f(layer_norm(x, *norm)) for f, norm in pairs])
    if len(functions[0]) == 1:
        return run_encoder(x, [attend for (attend,) in functions], steps, glu, final)
    return run_decoder(x, functions, steps, merge, glu, attn_residual, final)


def naive_stack(stack, x, kind, init, context, **options):
    if hasattr(stack.aggregator, "hidden"):
        return naive_depthwise(stack, x, kind, context, **options)
    layers = [naive_layer(layer, stack.stack, init, kind, *context) for layer in stack.layers]
    if hasattr(stack.aggregator, "layer_norms"):
        norms, weight = list(map(affine, stack.aggregator.layer_norms)), stack.aggregator.weight.unsqueeze(-1)
        return run_stack(x, layers, weight, norms, stack.stack.pre_norm)
    for layer in layers:
        x = layer(x)
    return x


def naive_scores(model, kind, batch, causal=True, init="plain", clip=None, encode=True, **options):
    """Scores (B x T x V) of a model from the equations; unless *encode*, with the output of its own encoder."""
    source, lengths, target = batch
    words = target.ne(PAD)

    def seen(b, i, j):
        return source[b, j] != PAD

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; no word sees padding
        return (j <= i or not causal) and (bool(words[b, j]) or j == i)

    masks, memory = (seen, earlier, naive_average.average_mask(words, causal)), None
    if not encode:
        memory = model.encoder(source, lengths)["encoder_out"][0]
    for stack, tokens in ((model.encoder, source), (model.decoder, target))[not encode :]:
        x = start(stack, tokens)
        if stack is model.encoder:
            x = x.masked_fill(source.eq(PAD).T.unsqueeze(-1), 0.0)
        x = naive_stack(stack, x, kind, init, (memory, masks, clip), **options)
        memory = x = x if affine(stack.layer_norm) is None else layer_norm(x, *affine(stack.layer_norm))
    return x.transpose(0, 1) @ model.decoder.output_projection.weight.T


@pytest.fixture
def make(build):
    """make(arch, deviation, **flags): a narrow model with random weights, in fp64."""

    def make(arch, deviation=0.5, **flags):
        model = build(arch, **flags).double()
        for stack in (model.encoder, model.decoder):
            shake(stack.layers, deviation), shake(stack.aggregator, deviation)
        model.decoder.need_attn = False  # its weights are of fp32
        return model

    return make


def assert_equations(model, kind, batch, causal=True, **options):
    source, lengths, target = batch
    words = target.ne(PAD)
    wanted = naive_scores(model, kind, batch, causal, **options)[words]
    encoded = model.encoder(source, lengths)
    actual = model.decoder(target, encoder_out=encoded, full_context_alignment=not causal)[0][words]
    torch.testing.assert_close(actual, wanted, rtol=1e-7, atol=1e-8)
    reads = any(getattr(layer, "encoder_attn", None) for layer in model.decoder.layers)
    assert_same_gradients(model if reads else model.decoder, wanted, actual)


def padded_batch(dictionary):
    """With padding on the left of sources, and on the left, on the right and in the middle of targets."""
    source, lengths, target = make_batch(dictionary, target_lengths=(4, 6, 6))
    target[1] = target[1].roll(2)
    target[1, :2], target[2, 3] = PAD, PAD
    return source, lengths, target


def fits(kind, stack):
    if stack == "another width":
        return kind not in ("self", "merged")  # one matrix for the values of both sides
    if "ffn" in kind and stack in ("lstm", "rnn"):
        return False  # whose layers have no feed-forward width
    # SSRU takes the place of average attention: a stack of each kind of layers
    return kind != "ssru" or stack in ("postnorm", "dlcl-pre", "lstm")


# full context changes masks, whatever connects the layers; a recurrence sees no later positions
ATTENTIONS = [(kind, stack, True) for kind in KINDS for stack in STACKS if fits(kind, stack)]
ATTENTIONS += [(kind, stack, False) for kind, stack, _ in ATTENTIONS if stack in ("prenorm", "lstm") and kind != "ssru"]


def test_every_attention_is_tested():
    kinds = {flags.get("decoder_attn", "self") for flags in (*KINDS.values(), LUNA)}
    assert kinds == set(DECODER_ATTENTIONS.names())


@pytest.mark.parametrize("kind, stack, causal", ATTENTIONS, ids=str)
def test_decoders_of_every_attention_equal_the_equations(kind, stack, causal, make, dictionary):
    name, flags = STACKS[stack]
    model = make(name, **{"decoder_layers": 3, **flags, **KINDS[kind]})
    assert_equations(model, kind, padded_batch(dictionary), causal, encode=False)


LSTMS = [
    *({"lstm_share": share} for share in ("none", "gate", "gate-encdec", "all")),
    *({"lstm_merge": merge, "lstm_share": share} for merge in ("concat", "two") for share in ("none", "gate")),
    *({"layer_agg": "rnn", "lstm_merge": merge, "lstm_share": share}
      for merge, share in (("add", "all"), ("concat", "all"), ("two", "all"), ("add", "none"), ("two", "none"))),
    {"lstm_merge": "concat", "lstm_attn_residual": False, "lstm_ffn": 1},
    {"lstm_merge": "two", "lstm_biases": True, "lstm_ffn": 1},
    {"lstm_biases": True, "lstm_final_norm": True, "lstm_hidden": 10, "relative_positions": 2},
    *({"lstm_glu": glu, "lstm_merge": "two", "relative_positions": 1} for glu in GLU),
    {"encoder_embed_dim": 12, "decoder_embed_dim": 16, "lstm_attn_residual": False},
    *({"decoder_attn": "average", **more} for more in (
        {"lstm_merge": "concat"}, {"lstm_merge": "two"}, {"lstm_attn_residual": False})),
]  # fmt: skip


@pytest.mark.parametrize("flags", LSTMS, ids=str)
def test_depthwise_lstms_equal_the_equations(flags, make, batch):
    model = make(LSTM, **flags)
    for part in (model.encoder.layers, model.decoder.layers, model.encoder.aggregator, model.decoder.aggregator):
        randomise(part)
    named = {name.removeprefix("lstm_"): value for name, value in flags.items() if name in (
        "lstm_merge", "lstm_attn_residual", "lstm_share", "lstm_glu")}  # fmt: skip
    assert_equations(model, flags.get("decoder_attn", "self"), batch, clip=flags.get("relative_positions"), **named)


INITS = [("lipschitz", "self"), ("deepnet", "self"), ("deepnet", "average"), ("tfixup", "self"), ("tfixup", "average")]
INITS += [(init, kind) for kind in KINDS for init in ("admin", "rezero")]
ALONE = {"no_cross_attention": True}
DLCL = "transformer_dlcl_postnorm_2l2l_tiny"


@pytest.mark.parametrize("arch, init, kind, more", [
    *((POSTNORM, *row, {}) for row in INITS), *((DLCL, init, "self", {}) for init in ("deepnet", "admin")),
    *((POSTNORM, init, "self", ALONE) for init in ("admin", "rezero")), (PRENORM, "fairseq", "self", ALONE),
], ids=str)  # fmt: skip
def test_residual_connections_of_initialisations_equal_the_equations(arch, init, kind, more, make, batch):
    """With a norm on the embedding where the method has one."""
    flags = {"deep_init": init, "layernorm_embedding": init == "lipschitz", "encoder_layers": 2, "decoder_layers": 3}
    model = make(arch, {"tfixup": 0.12, "rezero": 0.2}.get(init, 0.5), **flags, **KINDS[kind], **more)
    assert_equations(model, kind, batch, init=init, encode=kind == "self")


@pytest.mark.parametrize("kind", KINDS)
def test_the_profile_of_admin_follows_the_recursion(kind, build, dictionary):
    """omega of all connections of both stacks, on a batch without padding."""
    flags = {**KINDS[kind], "deep_init": "admin", "admin_start": "profile", "encoder_layers": 2, "decoder_layers": 3}
    model = build(POSTNORM, **flags).train()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5, 5), target_lengths=(6, 6, 6))
    means = naive_average.average_mask(target.ne(PAD))
    masks, memory, wanted = (lambda b, i, j: True, lambda b, i, j: j <= i, means), None, []
    with torch.no_grad():
        for stack, tokens in ((model.encoder, source), (model.decoder, target)):
            x = start(stack, tokens)
            pairs = [pair for layer in stack.layers for pair in sublayers(layer, kind, memory, masks)]
            wanted.append(naive_connections.profile(x, pairs))
            connected = [(f, naive_connections.connect("admin", omega), norm)
                         for (f, norm), omega in zip(pairs, wanted[-1])]  # fmt: skip
            memory = naive_connections.run_sublayers(x, connected, False)
        model(source, lengths, target)
    for stack, omegas in zip((model.encoder, model.decoder), wanted):
        assert omegas[0] == 1.0 and min(omegas[1:]) > 1.1
        actual = torch.cat([layer.residual.weight.detach() for layer in stack.layers])
        torch.testing.assert_close(actual, torch.tensor(omegas)[:, None].expand_as(actual), rtol=1e-4, atol=0)
