"""Whole models from their equations: scores with the parameters of a model of ours, one sub-layer after the other.

What is computed is read from the descriptions of its stacks, and each part from the equations of its method in this
folder. There is no LayerDrop.
"""

import argparse
import math
from dataclasses import dataclass, field

import torch

from . import naive_aggregators, naive_decoder_attentions, naive_lstm, naive_memories, naive_residuals
from .naive_attention import attention, relative_vector
from .naive_parts import LANGUAGES, dropped, gelu, linear, norm, projections, sigmoid, start

PAD = 1


@dataclass
class Context:
    """What the sub-layers of a stack share.

    Attributes:
        kind: the decoder's attention
        memories: of a decoder, one for each layer, with Luna p and p~; None in an encoder
        seen, earlier: whether query i of sentence b may see key j of a source, and of a target
        means: the matrix of average attention, B x T x T
        rows: whether a sentence uses the row j of Luna's packed sequence
        first: the values of the first self-attention, with value residual
        weights: those of all attentions, H x B x T x S, in the order in which they are computed
    """

    kind: str
    memories: list | None
    seen: object
    earlier: object
    means: torch.Tensor
    rows: object = None
    first: list = field(default_factory=list)
    weights: list = field(default_factory=list)

    def kept(self, found):
        """The output of an attention, whose weights are kept."""
        self.weights.append(found[1])
        return found[0]


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
        return context.kept(attention(*given, *relative, {**options, "values": values}))

    return function


def attentions(own, cross, number, context):
    """F of the attentions of a layer, one or two."""
    kind, memory = context.kind, None if context.memories is None else context.memories[number - 1]
    if hasattr(own, "pack"):
        return [pack_and_unpack(own, context)]
    if memory is None:
        return [attend(own, None, context.seen, context)]
    if kind == "luna":
        return [packed_causal(own, memory[0], context), attend(cross, memory[1], context.rows, context)]
    if kind == "merged":
        to_memory = (projections(cross), cross.num_heads, context.seen)
        last = (*to_memory, context.means, norm(cross.output_norm))
        return [lambda x: context.kept(naive_decoder_attentions.merged(x, memory, *last))]
    parts = [] if own is None else [to_target(own, context)]
    parts += [] if cross is None else [attend(cross, memory, context.seen, context)]
    if kind.startswith("merged"):  # rows 6 and 7 of Table 3 of the paper on merged attention: the sum of both
        return [lambda x: sum(part(x) for part in parts)]
    return parts


def pack_and_unpack(own, context):
    """F of Luna's encoder, of p followed by x."""

    def function(both):
        p, x = both[: own.length], both[own.length :]
        packed = attend(own.pack, x, context.seen, context)(p)
        return torch.cat([packed, attend(own, packed, context.rows, context)(x)])

    return function


def packed_causal(own, p, context):
    """F of Luna's decoder, of each sentence without padding and unused rows of *p*."""
    words, named = context.means.diagonal(dim1=1, dim2=2) > 0, projections(own, ("q", "k", "v", "pq", "pc", "out"))

    def function(x):
        sentences = []
        for b in range(x.size(1)):
            rows = [j for j in range(len(p)) if context.rows(b, 0, j)]
            heads = naive_decoder_attentions.causal(x[words[b], b], p[rows, b], named, own.num_heads)
            sentences.append(torch.zeros_like(x[:, b]).index_put((words[b],), heads))
        heads = torch.stack(sentences, dim=1)
        if own.gate is not None:
            gates = sigmoid(x @ own.gate.weight.T)
            heads = heads * gates.repeat_interleave(x.size(-1) // gates.size(-1), dim=-1)
        return linear(norm(own.output_norm)(heads), named["out"])

    return function


def to_target(own, context):
    """F of a decoder's attention to its own positions, or of what takes its place."""
    if "average" in context.kind:
        return lambda x: naive_decoder_attentions.average_attention(x, context.means, own)
    if context.kind == "ssru":
        return lambda x: naive_decoder_attentions.ssru(x, context.means.diagonal(dim1=1, dim2=2) > 0, own)
    return attend(own, None, context.earlier, context, True)


def feed_forward(layer, stack):
    """F of a feed-forward sub-layer."""

    def function(x):
        hidden = linear(x, layer.fc1)
        if layer.fc_linear is None:
            hidden = hidden * (hidden > 0)
        else:  # Shazeer, 2020, Eq. (6)
            hidden = (hidden * sigmoid(hidden) if stack.ffn == "swiglu" else gelu(hidden)) * linear(x, layer.fc_linear)
        return linear(norm(layer.ffn_norm)(dropped(hidden, "activation_dropout")), layer.fc2)

    return function


def sublayers(layer, stack, number, context):
    """The pairs (F, LN) of a *layer*, of one or more sub-layers."""
    own, cross = getattr(layer, "self_attn", None), getattr(layer, "encoder_attn", None)
    parallel = cross is not None and context.kind.startswith("merged")
    names = [name for name, part in (("self_attn", own), ("encoder_attn", cross)) if part is not None]
    norms = [norm(getattr(layer, f"{name}_layer_norm", None)) for name in (["encoder_attn"] if parallel else names)]
    if hasattr(own, "pack"):
        normalise, packed_norm = norms[0], norm(layer.packed_layer_norm)
        norms = [lambda both: torch.cat([packed_norm(both[: own.length]), normalise(both[own.length :])])]
    found = list(zip(attentions(own, cross, number, context), norms)) if names else []
    if hasattr(layer, "fc1"):
        found.append((feed_forward(layer, stack), norm(layer.final_layer_norm)))
    return found


def connections(layer, stack, number, count):
    """r(x, F(x), bottom) of each sub-layer, of tensors."""
    init, weight = stack.init.name, getattr(layer.residual, "weight", None)
    if init in ("deepnet", "admin", "rezero"):
        n, m = stack.encoder_layers, stack.decoder_layers
        alpha = 0.81 * (n**4 * m) ** (1 / 16) if stack.side == "encoder" else (3 * m) ** 0.25
        if init == "rezero":
            return [naive_residuals.weighted(weight)] * count
        return [lambda x, f, bottom, factor=factor: factor * x + f
                for factor in (weight if init == "admin" else [alpha] * count)]  # fmt: skip
    return [naive_residuals.connection(layer.residual, stack, number, index, index == count - 1)
            for index in range(count)]  # fmt: skip


def layer_function(layer, stack, number, context):
    """A layer, or a bare sub-layer, as a function of its input."""
    pairs, methods = sublayers(layer, stack, number, context), stack.residual.options if stack.residual else {}
    if not stack.layout.residual:
        ((function, normalise),) = pairs
        return lambda x: dropped(function(normalise(x)))
    pre_norm, residual = stack.pre_norm, stack.residual.name
    if residual == "mix-ln":
        pre_norm = number > (methods.get("layers") or max(1, stack.layers // 4))
    if "layernorm-scaling" in (residual, methods.get("around")):
        pairs = [(naive_residuals.reads_scaled(function, number), normalise) for function, normalise in pairs]
    connected = connections(layer, stack, number, len(pairs))
    length = getattr(getattr(layer, "self_attn", None), "length", 0)  # of Luna's p

    def run(x):
        bottom, above = x, []
        for (function, normalise), connect in zip(pairs, connected):
            f = dropped(function(normalise(x) if pre_norm else x))
            x = connect(x, f, bottom) if pre_norm else normalise(connect(x, f, bottom))
            if length and not above:  # the feed-forward sub-layer is of the words alone
                above, x, bottom = [x[:length]], x[length:], bottom[length:]
        return torch.cat([*above, x])

    return run


def depthwise(side, x, context):
    """Output of a depth-wise LSTM or RNN, whose layers are only attentions of normalised queries."""
    options = side.stack.aggregator.options
    places = 2 if side.stack.side == "decoder" and options.get("merge") == "two" else 1
    share = options.get("share") or ("gate" if len(side.aggregator.gates) else "none")
    steps, layers, functions = naive_lstm.steps_of(side.aggregator, share, places), list(side.layers), []
    for number, (first, last) in enumerate(zip(layers[::places], layers[places - 1 :: places]), 1):
        parts = {name: part for each in (last, first) for name, part in each._modules.items() if part is not None}
        pairs = sublayers(argparse.Namespace(**parts), side.stack, number, context)
        functions.append([lambda x, f=f, normalise=normalise: dropped(f(normalise(x))) for f, normalise in pairs])
    chosen = {name: options[name] for name in ("merge", "glu", "dropout") if name in options}
    output = naive_lstm.run_stack(x, functions, steps, side.stack.layout.attn_residual, **chosen)
    return norm(side.aggregator.final_norm)(output)


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


def packed_memories(memory, p, source, context):
    """The pairs p_j and p~_j of Luna's decoder."""
    p, found = norm(memory.layer_norm)(p), []
    for layer in memory.layers:
        normalise, pre_norm = norm(layer.layer_norm), layer.pre_norm
        packed = attend(layer.pack, source, context.seen, context)(normalise(p) if pre_norm else p)
        found.append((p, packed))
        p = p + dropped(packed) if pre_norm else normalise(p + dropped(packed))
    return found


def memories_of(encoder, x, outputs, count, context):
    """What the decoder layers attend to, from the *outputs* y_0 ... y_L; of MSC, from its layers."""
    memory, final = encoder.memory, norm(encoder.layer_norm)
    if encoder.packed is not None:
        length = encoder.packed.length
        p, source = outputs[-1][:length], final(outputs[-1][length:])
        return [source] * count if memory is None else packed_memories(memory, p, source, context)
    if memory is None:
        return [final(outputs[-1])] * count
    kind = type(memory).__name__
    if kind == "MscMemory":
        norms = list(map(norm, encoder.aggregator.context_norms)), list(map(norm, memory.memory_norms))
        cell = encoder.aggregator.cell
        weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return naive_memories.msc(x, outputs, len(norms[0]), weights, *norms)[1]
    found = (naive_memories.transparent(outputs, (1 + memory.dropout.p) * memory.weight) if kind == "Transparent"
             else naive_memories.layerwise(outputs, count))  # fmt: skip
    return list(map(final, found))


def language_of(source, tags):
    """The number of the tag that a sentence begins with, from 1; 0 for none."""
    first = next(word for word in source.tolist() if word != PAD)
    return tags.index(first) + 1 if first in tags else 0


def sinusoids(length, width):
    """Features of the positions 0 ... *length* - 1, in fp32 as those of models."""
    angles = [[j * 10000 ** (-i / (width // 2 - 1)) for i in range(width // 2)] for j in range(length)]
    return torch.tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles]).double()


def scores(model, batch, causal=True):
    """Scores (B x T x V) of *model*, and the weights of its last attention, the mean of its heads (B x T x S).

    Unless *causal*, target positions see later ones.
    """
    source, _, target = batch
    words, depth, kind = target.ne(PAD), model.decoder.stack.layers, model.decoder.stack.attention.name
    encoder, index = model.encoder, model.encoder.language_index
    LANGUAGES[:] = [] if index is None else [language_of(row, index.tags.tolist()) for row in source]

    def seen(b, i, j):
        return source[b, j] != PAD

    def earlier(b, i, j):  # padding sees itself, for softmax to be defined; no word sees padding
        return (j <= i or not causal) and (bool(words[b, j]) or j == i)

    def rows(b, i, j):
        return j < int(source[b].ne(PAD).sum())

    means = naive_decoder_attentions.average_mask(words, causal)
    x = start(encoder, source).masked_fill(source.eq(PAD).T.unsqueeze(-1), 0.0)
    if encoder.packed is not None:
        p = dropped(math.sqrt(x.size(-1)) * encoder.packed.weight + sinusoids(*encoder.packed.weight.shape))
        x = torch.cat([p.unsqueeze(1).expand(-1, len(source), -1), x])
    context = Context("self", None, seen, seen, means, rows)
    memories = memories_of(encoder, x, run_stack(encoder, x, context), depth, context)
    if encoder.language_transform is not None:
        matrices = encoder.language_transform.weight[LANGUAGES]
        memories = [torch.stack([z[:, b] @ matrix for b, matrix in enumerate(matrices)], dim=1) for z in memories]
    context = Context(kind, memories, seen, earlier, means, rows)
    x = run_stack(model.decoder, start(model.decoder, target), context)[-1]
    scores = norm(model.decoder.layer_norm)(x).transpose(0, 1) @ model.decoder.output_projection.weight.T
    return scores, context.weights[-1].mean(0)
