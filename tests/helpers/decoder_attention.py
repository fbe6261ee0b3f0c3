"""Decoders with every --decoder-attn: how to choose them, and their equations."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep.core.description import describe
from fairseq_deep.core.layers import DecoderLayer, ParallelDecoderLayer
from tests.helpers import layers
from tests.helpers.equations import affine, projections, start
from tests.helpers.lstm import named_steps
from tests.helpers.tensors import randomise, shake
from tests.reference import naive_average, naive_connections, naive_ssru
from tests.reference.naive_dlcl import layer_norm, run_stack
from tests.reference.naive_lstm import attention, run_decoder, run_encoder

PAD = Dictionary().pad()
NEAR = {"rtol": 1e-7, "atol": 1e-8}
# --decoder-attn, and the flags that choose it
KINDS = {
    "self": {},
    "average": {"decoder_attn": "average"},
    "average-ffn": {"decoder_attn": "average", "average_ffn": True},
    "merged": {"decoder_attn": "merged"},
    "merged-self": {"decoder_attn": "merged-self"},
    "merged-average": {"decoder_attn": "merged-average"},
    "merged-average-ffn": {"decoder_attn": "merged-average", "average_ffn": True},
    "ssru": {"decoder_attn": "ssru"},
}
# Luna, whose decoder reads more than layers of the others do: its equations are in test_luna.py
LUNA = {"decoder_attn": "luna", "encoder_attn": "luna", "luna_length": 3}
# how layers are connected, and where norms are: an architecture and further flags
STACKS = {
    "postnorm": ("transformer_postnorm_2l2l_tiny", {}),
    "prenorm": ("transformer_prenorm_2l2l_tiny", {}),
    "dlcl-post": ("transformer_dlcl_postnorm_2l2l_tiny", {}),
    "dlcl-pre": ("transformer_dlcl_2l2l_tiny", {}),
    "lstm": ("transformer_lstm_2l2l_tiny", {}),
    "rnn": ("transformer_lstm_2l2l_tiny", {"layer_agg": "rnn"}),
}


def _fits(kind, stack):
    if "ffn" in kind and stack in ("lstm", "rnn"):
        return False  # a feed-forward width is what the layers of a depth-wise LSTM have not
    # SSRU stands where average attention does: a stack of each kind of layers
    return kind != "ssru" or stack in ("postnorm", "dlcl-pre", "lstm")


COMBINATIONS = [(kind, stack) for kind in KINDS for stack in STACKS if _fits(kind, stack)]
every_combination = pytest.mark.parametrize("kind, stack", COMBINATIONS)
LUNA_STACKS = [("luna", stack) for stack in ("postnorm", "prenorm", "dlcl-pre")]
every_decoder = pytest.mark.parametrize("kind, stack", COMBINATIONS + LUNA_STACKS)
# which of them can let positions see later ones
FULL_CONTEXT = [(kind, stack) for kind, stack in COMBINATIONS if kind != "ssru"]
both_contexts = pytest.mark.parametrize(
    "kind, stack, full_context", [(*each, False) for each in COMBINATIONS] + [(*each, True) for each in FULL_CONTEXT]
)
both_contexts_of_decoders = pytest.mark.parametrize(
    "kind, stack, full_context", both_contexts.args[1] + [(*each, False) for each in LUNA_STACKS]
)


def is_parallel(kind):
    return kind.startswith("merged")


def attention_functions(layer, kind, memory, seen, earlier, mask):
    """F of the attentions of a decoder *layer*: two, or one where they are merged."""
    cross, own = layer.encoder_attn, layer.self_attn
    of_memory = (projections(cross), cross.num_heads, seen)
    if kind == "merged":
        return [lambda x: naive_average.merged(x, memory, *of_memory, mask)]
    if "average" in kind:
        linears = [own.fc1, own.fc2] if "ffn" in kind else []
        ffn = [part for linear in linears for part in (linear.weight, linear.bias)]
        gate = (own.gate.weight, own.gate.bias)
        average = lambda x: naive_average.average_attention(x, mask, gate, ffn or None)  # noqa: E731
        if is_parallel(kind):
            return [lambda x: naive_average.merged_average(x, memory, average, *of_memory)]
    elif kind == "ssru":
        words = mask.diagonal(dim1=1, dim2=2) > 0
        gate = (own.gate.weight, own.gate.bias)
        average = lambda x: naive_ssru.ssru(x, words, gate, own.input_proj.weight)  # noqa: E731
    elif is_parallel(kind):
        return [lambda x: naive_average.merged_self(x, memory, projections(own), *of_memory, earlier)]
    else:
        average = lambda x: attention(x, x, projections(own), own.num_heads, earlier)[0]  # noqa: E731
    return [average, lambda x: attention(x, memory, *of_memory)[0]]


def norms_of(layer, kind):
    names = ["encoder_attn"] if is_parallel(kind) else ["self_attn", "encoder_attn"]
    return [affine(getattr(layer, f"{name}_layer_norm")) for name in names]


def naive_layer(layer, kind, pre_norm, *context, method="plain"):
    """A whole layer of residual connections as a function of its input."""
    ffn = naive_connections.feed_forward_function(layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
    functions = [*attention_functions(layer, kind, *context), ffn]
    weight = getattr(layer.residual, "weight", None)  # of Admin for each sub-layer, of ReZero for all
    factors = [weight[index] if method == "admin" else weight for index in range(len(functions))]
    connections = [naive_connections.connect(method, factor) for factor in factors]
    sublayers = list(zip(functions, connections, [*norms_of(layer, kind), affine(layer.final_layer_norm)]))
    return lambda x: naive_connections.run_sublayers(x, sublayers, pre_norm)


def naive_depthwise(aggregator, layers, x, kind, context, merge="add", attn_residual=True):
    """Output of a stack of layers that are their attention alone, of normalised queries."""
    places, final = 2 if merge == "two" else 1, aggregator.final_norm and affine(aggregator.final_norm)
    share = "none" if not len(aggregator.gates) else "gate"
    steps = named_steps(aggregator, share, places)
    stack = []
    for first, last in zip(layers[::places], layers[places - 1 :: places]):
        whole = argparse.Namespace(self_attn=first.self_attn, encoder_attn=last.encoder_attn)
        whole.self_attn_layer_norm = getattr(first, "self_attn_layer_norm", None)
        whole.encoder_attn_layer_norm = last.encoder_attn_layer_norm
        pairs = zip(attention_functions(whole, kind, *context), norms_of(whole, kind))
        stack.append([lambda x, f=f, norm=norm: f(layer_norm(x, *norm)) for f, norm in pairs])
    if is_parallel(kind):
        return run_encoder(x, [attend for (attend,) in stack], steps, final_norm=final)
    return run_decoder(x, stack, steps, merge, attn_residual=attn_residual, final_norm=final)


def naive_scores(model, kind, stack, source, lengths, target, causal=True, method="plain", **options):
    """Scores (B x T x V) of the model's decoder from the equations alone, on what its encoder makes of the source."""
    decoder, words = model.decoder, target.ne(PAD)
    memory = model.encoder(source, lengths)["encoder_out"][0]

    def seen(b, i, j):
        return source[b, j] != PAD

    def earlier(b, i, j):
        return (j <= i or not causal) and bool(words[b, j])

    context = (memory, seen, earlier, naive_average.average_mask(words, causal))
    x, layers = start(decoder, target), list(decoder.layers)
    if stack in ("lstm", "rnn"):
        x = naive_depthwise(decoder.aggregator, layers, x, kind, context, **options)
    else:
        pre_norm = layers[0].normalize_before
        functions = [naive_layer(layer, kind, pre_norm, *context, method=method) for layer in layers]
        if stack.startswith("dlcl"):
            norms = [affine(norm) for norm in decoder.aggregator.layer_norms]
            x = run_stack(x, functions, decoder.aggregator.weight.unsqueeze(-1), norms, pre_norm)
        else:
            for function in functions:
                x = function(x)
    x = x if decoder.layer_norm is None else layer_norm(x, *affine(decoder.layer_norm))
    return x.transpose(0, 1) @ decoder.output_projection.weight.T


def make_model(build, kind, stack, **flags):
    """A narrow model with random parameters, in fp64."""
    name, options = STACKS[stack]
    model = build(name, **{"decoder_layers": 3, **options, **{**KINDS, "luna": LUNA}[kind], **flags}).double()
    parts = [model.decoder.layers, model.decoder.aggregator]
    if model.encoder.packed is not None:
        parts += [part for part in (model.encoder.packed, model.encoder.layers, model.encoder.memory) if part]
    for module in parts:
        shake(module, 0.5)
    model.decoder.need_attn = False  # its weights are of fp32
    return model


def assert_same_gradients(model, expected, actual):
    direction = torch.randn_like(actual)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(parameters.values()), direction)
    for name, want, got in zip(parameters, wanted, torch.autograd.grad(actual, list(parameters.values()), direction)):
        assert want.any() or name.endswith("k_proj.bias"), name
        torch.testing.assert_close(got, want, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


def config(kind, *options, **flags):
    cfg = layers.config(*options, **flags)
    for flag, value in KINDS[kind].items():
        setattr(cfg, flag, value)
    return cfg


def make_layer(kind, **flags):
    stack = describe(config(kind, **flags))["decoder"]
    return randomise(ParallelDecoderLayer(stack) if is_parallel(kind) else DecoderLayer(stack)).double()
