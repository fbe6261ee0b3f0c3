"""Decoders with every --decoder-attn against the equations: layers, whole models, every gradient, dropout."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, base_architecture

from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.description import describe
from fairseq_deep.core.layers import DecoderContext, DecoderLayer, ParallelDecoderLayer
from tests.reference import naive_average, naive_connections
from tests.reference.naive_dlcl import layer_norm, run_stack
from tests.reference.naive_lstm import attention, run_decoder, run_encoder
from tests.unit.test_dlcl import randomise
from tests.unit.test_inits_models import affine, start
from tests.unit.test_lstm import named_steps

PAD = Dictionary().pad()
DOUBLE = {"dtype": torch.float64}
# before torch 2.0, ours rounds softmax to fp32
EXACT = hasattr(torch.nn.functional, "scaled_dot_product_attention")
NEAR = {"rtol": 1e-7, "atol": 1e-8} if EXACT else {"rtol": 1e-4, "atol": 1e-4}

# --decoder-attn, and the flags that choose it
KINDS = {
    "self": {},
    "average": {"decoder_attn": "average"},
    "average-ffn": {"decoder_attn": "average", "average_ffn": True},
    "merged": {"decoder_attn": "merged"},
    "merged-self": {"decoder_attn": "merged-self"},
    "merged-average": {"decoder_attn": "merged-average"},
    "merged-average-ffn": {"decoder_attn": "merged-average", "average_ffn": True},
}
# how layers are connected, and where norms are: an architecture and further flags
STACKS = {
    "postnorm": ("transformer_postnorm_2l2l_tiny", {}),
    "prenorm": ("transformer_prenorm_2l2l_tiny", {}),
    "dlcl-post": ("transformer_dlcl_postnorm_2l2l_tiny", {}),
    "dlcl-pre": ("transformer_dlcl_2l2l_tiny", {}),
    "lstm": ("transformer_lstm_2l2l_tiny", {}),
    "rnn": ("transformer_lstm_2l2l_tiny", {"layer_agg": "rnn"}),
}
# a feed-forward width is what the layers of a depth-wise LSTM have not
COMBINATIONS = [(kind, stack) for kind in KINDS for stack in STACKS if not (stack in ("lstm", "rnn") and "ffn" in kind)]
every_combination = pytest.mark.parametrize("kind, stack", COMBINATIONS)


def test_every_attention_is_tested():
    assert {flags.get("decoder_attn", "self") for flags in KINDS.values()} == set(DECODER_ATTENTIONS.names())


def is_parallel(kind):
    return kind.startswith("merged")


def projections(module):
    roles = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj, "out": module.out_proj}
    return {role: (linear.weight, linear.bias) for role, linear in roles.items()}


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


@pytest.fixture
def make(build):
    """make(kind, stack, **flags): a narrow model with random parameters, in fp64."""

    def make(kind, stack, **flags):
        name, options = STACKS[stack]
        model = build(name, **{"decoder_layers": 3, **options, **KINDS[kind], **flags}).double()
        with torch.no_grad():
            for parameter in (*model.decoder.layers.parameters(), *model.decoder.aggregator.parameters()):
                parameter.normal_(std=0.5)
        model.decoder.need_attn = False  # its weights are of fp32
        return model

    return make


def assert_same_gradients(model, expected, actual):
    direction = torch.randn_like(actual)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(parameters.values()), direction)
    for name, want, got in zip(parameters, wanted, torch.autograd.grad(actual, list(parameters.values()), direction)):
        assert want.any() or name.endswith("k_proj.bias"), name
        torch.testing.assert_close(got, want, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


@every_combination
@pytest.mark.parametrize("causal", [True, False], ids=["", "full_context"])
def test_scores_and_gradients_equal_the_equations(kind, stack, causal, make, batch):
    model, (source, lengths, target) = make(kind, stack), batch
    words = target.ne(PAD)
    expected = naive_scores(model, kind, stack, *batch, causal)[words]
    encoder_out = model.encoder(source, lengths)
    actual = model.decoder(target, encoder_out=encoder_out, full_context_alignment=not causal)[0][words]
    torch.testing.assert_close(actual, expected, **NEAR)
    assert_same_gradients(model, expected, actual)


@pytest.mark.parametrize("options", [{"merge": "concat"}, {"merge": "two"}, {"attn_residual": False}], ids=str)
def test_average_attention_in_every_layer_of_a_depthwise_lstm(options, make, batch):
    model, words = make("average", "lstm", **{f"lstm_{key}": value for key, value in options.items()}), batch[2].ne(PAD)
    expected, actual = naive_scores(model, "average", "lstm", *batch, **options)[words], model(*batch)[0][words]
    torch.testing.assert_close(actual, expected, **NEAR)
    assert_same_gradients(model, expected, actual)


T, S, B, C, E, F = 6, 5, 3, 8, 12, 20


def config(kind, pre_norm=False, encoder_dim=C, **flags):
    flags = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, **flags}
    for side, dim in (("encoder", encoder_dim), ("decoder", C)):
        flags.update({f"{side}_embed_dim": dim, f"{side}_ffn_embed_dim": F, f"{side}_attention_heads": 2,
                      f"{side}_normalize_before": pre_norm})  # fmt: skip
    args = argparse.Namespace(**flags)
    base_architecture(args)
    cfg = TransformerConfig.from_namespace(args)
    for flag, value in KINDS[kind].items():
        setattr(cfg, flag, value)
    return cfg


def make_layer(kind, **flags):
    stack = describe(config(kind, **flags))["decoder"]
    return randomise(ParallelDecoderLayer(stack) if is_parallel(kind) else DecoderLayer(stack)).double()


def layer_inputs(dim=C):
    return torch.randn(T, B, C, requires_grad=True, **DOUBLE), torch.randn(S, B, dim, requires_grad=True, **DOUBLE)


def future_mask():
    return torch.full((T, T), -1e4, **DOUBLE).triu(1)


# columns of the target (second sentence, third) and of the source (first, second) that are padding
PADDING = {"none": (), "left": (0, [0, 1]), "right": ([4], -1), "middle": (2, [1, 3])}


@pytest.mark.parametrize("kind, dim", [(kind, dim) for kind in KINDS for dim in (C, E) if (kind, dim) != ("merged", E)])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("padding", PADDING)
def test_layers_equal_the_equations(kind, pre_norm, padding, dim):
    """Also where the encoder has another width; merged attention has one matrix for the values of both sides."""
    layer, (x, memory) = make_layer(kind, pre_norm=pre_norm, encoder_dim=dim), layer_inputs(dim)
    words, source = torch.ones(B, T, dtype=torch.bool), torch.ones(B, S, dtype=torch.bool)
    for sentence, columns in enumerate(PADDING[padding]):
        words[sentence + 1, columns] = source[sentence, columns] = False

    def seen(b, i, j):
        return bool(source[b, j])

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; nobody sees that
        return j <= i and (bool(words[b, j]) or j == i)

    masks = {} if padding == "none" else {"memory_padding": ~source, "padding": ~words}
    actual, attn = layer(x, DecoderContext(memory, mask=future_mask(), **masks))
    assert attn is None
    expected = naive_layer(layer, kind, pre_norm, memory, seen, earlier, naive_average.average_mask(words))(x)
    actual, expected = actual.transpose(0, 1)[words], expected.transpose(0, 1)[words]
    torch.testing.assert_close(actual, expected, **NEAR)
    direction, sources = torch.randn_like(actual), [x, memory, *layer.parameters()]
    wanted = torch.autograd.grad(expected, sources, direction)
    for want, got in zip(wanted, torch.autograd.grad(actual, sources, direction)):
        torch.testing.assert_close(got, want, **NEAR)


def test_values_and_outputs_of_merged_attention_are_one_parameter():
    """The gradient of W_v, W_o and their biases is the sum of what comes from both paths, and each gives some."""
    layer, (x, memory) = make_layer("merged"), layer_inputs()
    names = {name for name, _ in layer.named_parameters()}
    roles = {"encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj", "fc1", "fc2"}
    roles |= {"encoder_attn_layer_norm", "final_layer_norm"}
    assert names == {f"{role}.{part}" for role in roles for part in ("weight", "bias")}
    output, _ = layer.attend(x, DecoderContext(memory, mask=future_mask()), False)
    both, direction = projections(layer.encoder_attn), torch.randn_like(output)
    shared = [*both["v"], *both["out"]]
    copies = [[part.detach().clone().requires_grad_() for part in shared] for _ in range(2)]
    (v_1, b_1, o_1, c_1), (v_2, b_2, o_2, c_2) = copies
    to_source = {**both, "v": (v_1, b_1), "out": (o_1, c_1)}
    mask = naive_average.average_mask(torch.ones(B, T, dtype=torch.bool))
    saan = naive_average.mean(x @ v_2.T + b_2, mask) @ o_2.T
    expected = attention(x, memory, to_source, 2, lambda b, i, j: True)[0] + saan + 0 * c_2.sum()
    torch.testing.assert_close(output, expected, **NEAR)
    got = torch.autograd.grad(output, shared, direction)
    first = torch.autograd.grad(expected, copies[0], direction, retain_graph=True)
    second = torch.autograd.grad(expected, copies[1], direction)
    for index, (want_1, want_2) in enumerate(zip(first, second)):
        assert want_1.any() and (want_2.any() or index == 3), "the bias of W_o is added once"
        torch.testing.assert_close(got[index], want_1 + want_2, **NEAR)
