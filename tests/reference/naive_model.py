"""Whole models from their equations: scores with the parameters of a model of ours, one sub-layer after the other.

What is computed is read from the descriptions of its stacks, and each part from the equations of its method in this
folder. Luna has equations of its own (``naive_luna.py``); there are no languages here, no dropout and no LayerDrop.
"""

import argparse
from dataclasses import dataclass, field

import torch

from fairseq_deep.core.norms import RmsNorm
from tests.helpers.equations import affine, named_steps, projections, start

from . import naive_aggregators, naive_average, naive_connections, naive_memories, naive_residuals, naive_ssru
from .naive_attention import attention, gated_feed_forward, relative_vector, rms_norm
from .naive_dlcl import layer_norm
from .naive_lstm import run_decoder, run_encoder

PAD = 1
UPDATE = 4  # the number of the update, from 1, in which branches that grow are compared


@dataclass
class Context:
    """What the sub-layers of a stack share.

    Attributes:
        kind: the decoder's attention
        memories: of a decoder, one for each layer; None in an encoder
        seen, earlier: whether query i of sentence b may see key j of a source, and of a target
        means: the matrix of average attention, B x T x T
        first: the values of the first self-attention, with value residual
    """

    kind: str
    memories: list | None
    seen: object
    earlier: object
    means: torch.Tensor
    first: list = field(default_factory=list)


def norm(module):
    """A norm as a function."""
    if module is None or not list(module.parameters()):
        return lambda x: x
    if isinstance(module, RmsNorm):
        return lambda x: rms_norm(x, module.weight)
    return lambda x: layer_norm(x, module.weight, module.bias)


def attend(module, keys, visible, context, causal=False):
    """F of an attention, to *keys* or, if None, to its own input."""
    tables = (module.relative_keys, module.relative_values)
    relative = [None if table is None else relative_vector(table, len(table) - 2 if causal else len(table) // 2, causal)
                for table in tables]  # fmt: skip
    options = {name: None if part is None else part.weight for name, part in (
        ("q_norm", module.q_norm), ("k_norm", module.k_norm), ("gate", module.gate))}  # fmt: skip
    options.update(rotary=module.rotary is not None, output_norm=norm(module.output_norm))

    def function(x):
        values = module.v_proj(x) if keys is None else None
        if module.value_residual is not None:
            a, b = module.value_residual.weight
            values = a * context.first[0] + b * values
        elif keys is None:
            context.first.append(values)
        given = (x, x if keys is None else keys, projections(module), module.num_heads, visible)
        return attention(*given, *relative, {**options, "values": values})[0]

    return function


def attentions(own, cross, number, context):
    """F of the attentions of a layer, one or two."""
    kind, memory = context.kind, None if context.memories is None else context.memories[number - 1]
    if memory is None:
        return [attend(own, None, context.seen, context)]
    if kind == "merged":
        to_memory = (projections(cross), cross.num_heads, context.seen)
        return [lambda x: naive_average.merged(x, memory, *to_memory, context.means, norm(cross.output_norm))]
    parts = [] if own is None else [to_target(own, context)]
    parts += [] if cross is None else [attend(cross, memory, context.seen, context)]
    if kind.startswith("merged"):  # rows 6 and 7 of Table 3 of the paper on merged attention: the sum of both
        return [lambda x: sum(part(x) for part in parts)]
    return parts


def to_target(own, context):
    """F of a decoder's attention to its own positions, or of what takes its place."""
    if "average" in context.kind:
        linears = [linear for linear in (own.fc1, own.fc2) if linear is not None]
        ffn = [part for linear in linears for part in (linear.weight, linear.bias)]
        gate = (own.gate.weight, own.gate.bias)
        return lambda x: naive_average.average_attention(x, context.means, gate, ffn or None)
    if context.kind == "ssru":
        words, gate = context.means.diagonal(dim1=1, dim2=2) > 0, (own.gate.weight, own.gate.bias)
        return lambda x: naive_ssru.ssru(x, words, gate, own.input_proj.weight)
    return attend(own, None, context.earlier, context, True)


def feed_forward(layer, stack):
    """F of a feed-forward sub-layer."""
    if layer.fc_linear is not None:
        return lambda x: gated_feed_forward(layer, x, stack.ffn, norm(layer.ffn_norm))
    matrices = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
    return naive_connections.feed_forward_function(*matrices, norm(layer.ffn_norm))


def sublayers(layer, stack, number, context):
    """The pairs (F, LN) of a *layer*, of one or more sub-layers."""
    own, cross = getattr(layer, "self_attn", None), getattr(layer, "encoder_attn", None)
    parallel = cross is not None and context.kind.startswith("merged")
    names = [name for name, part in (("self_attn", own), ("encoder_attn", cross)) if part is not None]
    norms = [norm(getattr(layer, f"{name}_layer_norm", None)) for name in (["encoder_attn"] if parallel else names)]
    found = list(zip(attentions(own, cross, number, context), norms)) if names else []
    if hasattr(layer, "fc1"):
        found.append((feed_forward(layer, stack), norm(layer.final_layer_norm)))
    return found


def connections(layer, stack, number, count):
    """r(x, F(x), bottom) of each sub-layer, of tensors."""
    init, weight = stack.init.name, getattr(layer.residual, "weight", None)
    if init in ("deepnet", "admin", "rezero"):
        alpha = naive_connections.deepnet_alpha(stack.side, stack.encoder_layers, stack.decoder_layers)
        factors = {"deepnet": [alpha] * count, "rezero": [weight] * count, "admin": weight}[init]
        forms = [naive_connections.connect(init, factor) for factor in factors]
        return [lambda x, f, bottom, form=form: form(x, f) for form in forms]
    if stack.residual.name == "plain":
        return [lambda x, f, bottom: x + f] * count
    forms = [equation(layer.residual, stack, number, index, index == count - 1) for index in range(count)]
    return [lambda *tensors, form=form: naive_residuals.each_feature(form, *tensors) for form in forms]


def equation(residual, stack, number, index, last):
    """The plain form of one sub-layer's connection, with the weights of *residual*."""
    name, options, naive = stack.residual.name, stack.residual.options, naive_residuals
    if name in ("sdu", "highway") and number <= options.get("layers", number):
        (w_1, w_2), (b_1, b_2) = (part.chunk(2) for part in residual.linears[index].parameters())
        if name == "sdu":
            return naive.sdu(w_1, b_1, w_2, b_2, naive.tanh if options.get("activation") == "tanh" else naive.sigmoid)
        return (naive.gated_attention if options.get("form") == "attention" else naive.highway_gate)(w_1, b_1, w_2, b_2)
    factor = 1 / stack.layers if options.get("around") == "completep" else 1
    return {
        "sdu": lambda: naive.plain,
        "b2t": lambda: naive.bottom_to_top(last),
        "peri": lambda: naive.peri(*residual.layer_norms[index].parameters()),
        "layerscale": lambda: naive.layerscale(residual.weight[index]),
        "completep": lambda: naive.completep(stack.layers, options.get("base", 1.0), options.get("alpha", 1.0)),
        "layernorm-scaling": lambda: naive.plain,
        "mix-ln": lambda: naive.plain,
        "prores": lambda: naive.prores(UPDATE, options.get("period", 1000), number, factor),
        "branchnorm": lambda: naive.branchnorm(UPDATE, options.get("updates", 4000)),
    }[name]()


def layer_function(layer, stack, number, context):
    """A layer, or a bare sub-layer, as a function of its input."""
    pairs, methods = sublayers(layer, stack, number, context), stack.residual.options if stack.residual else {}
    if not stack.layout.residual:
        ((function, normalise),) = pairs
        return lambda x: function(normalise(x))
    pre_norm, residual = stack.pre_norm, stack.residual.name
    if residual == "mix-ln":
        pre_norm = number > (methods.get("layers") or max(1, stack.layers // 4))
    if "layernorm-scaling" in (residual, methods.get("around")):
        pairs = [(naive_residuals.reads_scaled(function, number), normalise) for function, normalise in pairs]
    connected = connections(layer, stack, number, len(pairs))

    def run(x):
        bottom = x
        for (function, normalise), connect in zip(pairs, connected):
            f = function(normalise(x) if pre_norm else x)
            x = connect(x, f, bottom) if pre_norm else normalise(connect(x, f, bottom))
        return x

    return run


def depthwise(side, x, context):
    """Output of a depth-wise LSTM or RNN, whose layers are only attentions of normalised queries."""
    options, final = side.stack.aggregator.options, affine(side.aggregator.final_norm)
    merge, glu = options.get("merge", "add"), options.get("glu", "sigmoid")
    places = 2 if side.stack.side == "decoder" and merge == "two" else 1
    share = options.get("share") or ("gate" if len(side.aggregator.gates) else "none")
    steps, layers, functions = named_steps(side.aggregator, share, places), list(side.layers), []
    for number, (first, last) in enumerate(zip(layers[::places], layers[places - 1 :: places]), 1):
        parts = {name: part for each in (last, first) for name, part in each._modules.items() if part is not None}
        pairs = sublayers(argparse.Namespace(**parts), side.stack, number, context)
        functions.append([lambda x, f=f, normalise=normalise: f(normalise(x)) for f, normalise in pairs])
    if len(functions[0]) == 1:
        return run_encoder(x, [attend for (attend,) in functions], steps, glu, final)
    return run_decoder(x, functions, steps, merge, glu, side.stack.layout.attn_residual, final)


def run_stack(side, x, context):
    """The outputs y_0 ... y_L of the layers of an encoder or decoder, the last one before its final norm.

    Of a depth-wise LSTM only the last, and of MSC's encoder the layers, as functions.
    """
    stack, outputs = side.stack, [x]
    if not stack.layout.feed_forward:
        return [depthwise(side, x, context)]

    def recorded(function):
        def call(x):
            outputs.append(function(x))
            return outputs[-1]

        return call

    per_layer = side.modules_per_layer
    layers = [recorded(layer_function(layer, stack, 1 + index // per_layer, context))
              for index, layer in enumerate(side.layers)]  # fmt: skip
    name, options = stack.aggregator.name, dict(stack.aggregator.options)
    options.pop("inner", None)
    if name == "msc" and stack.side == "encoder":
        return layers
    name = "residual" if name == "msc" else name  # which is of encoders
    path = naive_aggregators.path(name, side.aggregator, x, layers, stack.side, **options)
    return [*outputs[:-1], path[-1]]


def memories_of(encoder, x, outputs, count):
    """What the decoder layers attend to, from the *outputs* y_0 ... y_L; of MSC, from its layers."""
    memory, final = encoder.memory, norm(encoder.layer_norm)
    if memory is None:
        return [final(outputs[-1])] * count
    kind = type(memory).__name__
    if kind == "MscMemory":
        norms = list(map(affine, encoder.aggregator.context_norms)), list(map(affine, memory.memory_norms))
        cell = encoder.aggregator.cell
        weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return naive_memories.msc(x, outputs, len(norms[0]), weights, *norms)[1]
    found = (naive_memories.transparent(outputs, memory.weight) if kind == "Transparent"
             else naive_memories.layerwise(outputs, count))  # fmt: skip
    return list(map(final, found))


def scores(model, batch, causal=True):
    """Scores (B x T x V) of *model*; unless *causal*, target positions see later ones."""
    source, _, target = batch
    words, depth, kind = target.ne(PAD), model.decoder.stack.layers, model.decoder.stack.attention.name

    def seen(b, i, j):
        return source[b, j] != PAD

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; no word sees padding
        return (j <= i or not causal) and (bool(words[b, j]) or j == i)

    means = naive_average.average_mask(words, causal)
    x = start(model.encoder, source).masked_fill(source.eq(PAD).T.unsqueeze(-1), 0.0)
    outputs = run_stack(model.encoder, x, Context("self", None, seen, seen, means))
    memories = memories_of(model.encoder, x, outputs, depth)
    x = run_stack(model.decoder, start(model.decoder, target), Context(kind, memories, seen, earlier, means))[-1]
    return norm(model.decoder.layer_norm)(x).transpose(0, 1) @ model.decoder.output_projection.weight.T
