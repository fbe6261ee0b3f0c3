"""Immutable description of a stack of layers, from which methods and layers are built.

``description.py`` converts flags to descriptions. A description with only sizes is enough to use a method by itself:
``Dlcl(Stack(layers=6, dim=512))``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from fairseq_deep.errors import UsageError, nearest, printable

from .fields import Range, check_fields, hints_of

_PLACES = ("self", "stack", "number", "encoder", "decoder", "inner")
"""Arguments of a method's constructor that are not options."""
GATED = {"swiglu": "swish", "geglu": "gelu"}
"""The gated feed-forward networks by their names (``--ffn``), with their activation functions."""
_SIZE, _WIDTH, _SHARE = Range(0), Range(1), Range(0, 1)
RULES: dict[str, Any] = {
    **{name: _SIZE for name in ("layers", "other_layers", "ffn_dim", "languages")},
    **{name: _WIDTH for name in ("dim", "heads", "kv_heads", "memory_dim", "output_dim", "max_positions",
                                 "relative_positions")},
    **{name: _SHARE for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop")},
    "side": ("encoder", "decoder"),
    "positions": ("sinusoidal", "learned", "none", "rotary"),
    "norm": ("layer", "rms"),
    "ffn": ("plain", *GATED),
    "attention_gate": ("heads", "features"),
    "activation": ("relu", "relu_squared", "gelu", "gelu_accurate", "gelu_fast", "swish", "tanh", "linear"),
}  # fmt: skip
"""Ranges and names of the attributes of :class:`Stack`."""
FLAGS = {
    **{name: f"{{side}}_{name}" for name in ("layers", "kv_heads", "layerdrop")},
    **{"dim": "{side}_embed_dim", "ffn_dim": "{side}_ffn_embed_dim", "heads": "{side}_attention_heads"},
    **{"max_positions": "max_{end}_positions", "languages": "num_languages", "activation": "activation_fn"},
    **{"output_dim": "decoder_output_dim", "memory_dim": "encoder_embed_dim", "other_layers": "{other}_layers"},
    **{"pre_norm": "{side}_normalize_before", "embedding_norm": "layernorm_embedding"},
    **{"aggregator": "{side}_layer_agg", "init": "{side}_deep_init", "residual": "{side}_residual"},
    **{"attention": "{side}_attn", "memory": "decoder_memory", "scale_embedding": "no_scale_embedding"},
    **{"cross_attention": "no_cross_attention", "final_norm": "no_decoder_final_norm"},
    **{name: name for name in ("norm", "ffn", "attention_gate", "relative_positions", "relative_values", "qk_norm",
                               "sub_norm", "value_residual", "language_transform", "language_norm", "dropout",
                               "attention_dropout", "activation_dropout", "alignment_layer", "alignment_heads")},
}  # fmt: skip
"""Flags that set attributes of :class:`Stack`; a flag ``no_...`` sets the opposite."""


def flag_of(name: str, side: str) -> str:
    """Return the flag of the attribute *name* of :class:`Stack`, with underscores; *name* if it has no flag."""
    other, end = ("decoder", "source") if side == "encoder" else ("encoder", "target")
    return FLAGS.get(name, name).format(side=side, other=other, end=end)


def options_of(method: Any) -> list[str]:
    """Return the names of the options of a method, which are arguments of its constructor."""
    return [name for name in inspect.signature(method.__init__).parameters if name not in _PLACES]


@dataclass(frozen=True)
class Layout:
    """Structure of the layers in a stack, as its aggregator requires it.

    Attributes:
        residual: sub-layers have residual connections; otherwise the aggregator does all additions
        feed_forward: layers have a feed-forward sub-layer
        attention_bias: the projections of attentions have biases
        input_norm: sub-layers without residual connection normalise their input
        merge: for decoder layers that only have two attentions: "add" their outputs or "concat" them
        attn_residual: in these layers, the layer's input is added to the query of the second attention
        split: each sub-layer is a separate module without residual connection, and the aggregator acts after each
        final_norm: a pre-norm stack has a norm after the last layer
        num_evaluations: evaluations of a layer for one output; see :meth:`Aggregator.next_input`
    """

    residual: bool = True
    feed_forward: bool = True
    attention_bias: bool = True
    input_norm: bool = True
    merge: str = "add"
    attn_residual: bool = False
    split: bool = False
    final_norm: bool = True
    num_evaluations: int = 1


@dataclass(frozen=True)
class MethodConfig:
    """Method of one axis with its options.

    Attributes:
        name: its name in the registry
        method: its class
        options: the constructor's arguments set by flags

    Raises:
        UsageError: *method* is not a class, or an option is unknown or has a wrong type
    """

    name: str
    method: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.method, type):
            raise UsageError(f"MethodConfig {self.name}: method must be a class ({printable(self.method)}); "
                             'use MethodConfig("dlcl", Dlcl, {"window": 2})')  # fmt: skip
        known = options_of(self.method)
        for option in self.options:
            if option not in known and option != "inner":
                names = f"choose from {', '.join(known)}" if known else "it has none"
                raise UsageError(f"unknown option {option} of {self.name}{nearest(option, known)}; {names}")
        declared = getattr(self.method, "options", {})
        rules = {name: option.rule for name, option in declared.items()}
        check_fields(self.options, self.method.__init__, rules, self.flag)
        defaults = inspect.signature(self.method.__init__).parameters
        for name, value in self.options.items():
            needs = declared[name].needs if name in declared and value != defaults[name].default else None
            if needs is not None:
                chosen = self.options.get(needs[0], defaults[needs[0]].default)
                if chosen not in needs[1]:
                    fix = f"omit it, or use {' or '.join(map(str, needs[1]))}"
                    raise UsageError(f"{self.flag(name)} has no effect with {self.flag(needs[0])} {chosen}: {fix}")

    def flag(self, option: str) -> str:
        """Return the flag of *option*, for messages."""
        return f"--{getattr(self.method, 'prefix', '') or self.name}-{option}".replace("_", "-")

    def with_inner(self, inner: MethodConfig) -> MethodConfig:
        """Return this method with its *inner* method."""
        return replace(self, options={**self.options, "inner": inner})

    def build(self, *args) -> Any:
        """Build the method with its options."""
        return self.method(*args, **self.options)


@dataclass(frozen=True)
class Stack:
    """Description of one stack of a Transformer.

    Attributes:
        layers: depth; 0: only embeddings and the final norm
        dim: width C
        pre_norm: sub-layers normalise their input (with a norm after the stack), not their residual sum
        side: "encoder" or "decoder"
        ffn_dim, heads: width of the feed-forward sub-layers, number of attention heads
        other_layers: depth of the other stack; None: the same
        memory_dim: (decoder) width of the memories; None: *dim*
        cross_attention: (decoder) layers attend to a source
        dropout, attention_dropout, activation_dropout: probabilities
        activation: name of the feed-forward sub-layer's activation function
        max_positions: greatest number of tokens in a sentence
        positions: absolute ones, "sinusoidal", "learned" or "none"; "rotary": rotations in self-attention
        scale_embedding: embeddings are multiplied by sqrt(C)
        embedding_norm: a norm follows embeddings and positions
        final_norm: a pre-norm stack has a norm after its last layer
        output_dim: (decoder) width before the output projection; None: C
        tied_output: (decoder) the output projection is the embedding
        relative_positions: largest distance K of relative positions; None for none
        relative_values: relative positions also have vectors for the values
        norm: kind of the norms of layers and stack, "layer" or "rms"
        ffn: kind of feed-forward sub-layer, "plain", "swiglu" or "geglu"
        kv_heads: number of attention heads for keys and values; None: as many as for queries
        qk_norm: queries and keys of a head are normalised
        attention_gate: gate on the output of attention, per "heads" or "features"; None: there is none
        sub_norm: each sub-layer also has a norm before its last matrix
        value_residual: self-attentions above the first layer also read that layer's values
        languages: number of target languages with a tag in the source dictionary
        language_transform: a matrix of the target language transforms the encoder's output
        language_norm: the norms of layers and stack have gains and biases per target language
        recompute: the backward pass recomputes activations
        offload: until then, the inputs of layers are stored in CPU memory
        layerdrop: probability of skipping a layer in training
        pads_right: (decoder) targets are padded on the right, never on the left
        aligns: (decoder) training also needs attention weights
        alignment_layer: (decoder) index of the layer that returns attention weights, from 0; None: the last
        alignment_heads: (decoder) number of heads to average; None: all
        layout: the structure of the layers; an aggregator sets it
        aggregator, init, residual, attention, memory: the methods; None if a part is built separately

    Raises:
        UsageError: an attribute has a wrong type, is out of range, unknown, or contradicts another
    """

    layers: int
    dim: int
    pre_norm: bool = True
    side: str = "encoder"
    ffn_dim: int = 0
    heads: int = 1
    other_layers: int | None = None
    memory_dim: int | None = None
    cross_attention: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    max_positions: int = 1024
    positions: str = "sinusoidal"
    scale_embedding: bool = True
    embedding_norm: bool = False
    final_norm: bool = True
    output_dim: int | None = None
    tied_output: bool = False
    relative_positions: int | None = None
    relative_values: bool = False
    norm: str = "layer"
    ffn: str = "plain"
    kv_heads: int | None = None
    qk_norm: bool = False
    attention_gate: str | None = None
    sub_norm: bool = False
    value_residual: bool = False
    languages: int = 0
    language_transform: bool = False
    language_norm: bool = False
    recompute: bool = False
    offload: bool = False
    layerdrop: float = 0.0
    pads_right: bool = False
    aligns: bool = False
    alignment_layer: int | None = None
    alignment_heads: int | None = None
    layout: Layout = Layout()
    aggregator: MethodConfig | None = None
    init: MethodConfig | None = None
    residual: MethodConfig | None = None
    attention: MethodConfig | None = None
    memory: MethodConfig | None = None

    def __post_init__(self):
        check_fields({name: getattr(self, name) for name in hints_of(Stack)}, Stack, RULES, self.flag)
        for axis in ("aggregator", "init", "residual", "attention", "memory"):
            chosen = getattr(self, axis)
            if not isinstance(chosen, MethodConfig | None):
                raise UsageError(
                    f'{axis} must be a MethodConfig ({printable(chosen)}): use MethodConfig(NAME, CLASS), such as '
                    'MethodConfig("dlcl", Dlcl) with `from fairseq_deep.core.aggregators import Dlcl`'
                )
        self._check_together()
        if self.aggregator is not None:
            if not hasattr(self.aggregator.method, "layout"):
                raise UsageError(f"aggregator must be a method of --layer-agg ({self.aggregator.name}): change it")
            object.__setattr__(self, "layout", self.aggregator.method.layout(self.side, self.aggregator.options))

    def flag(self, name: str) -> str:
        """Return the flag that sets the attribute *name*, or *name* itself, for messages."""
        return f"--{flag_of(name, self.side)}".replace("_", "-") if name in FLAGS else name

    def given(self, name: str) -> tuple[str, Any]:
        """Return the flag of the attribute *name* and its value, or the attribute itself, for messages."""
        flag, value = self.flag(name), getattr(self, name)
        return flag, not value if flag.startswith("--no-") else value

    def _check_together(self) -> None:
        """Reject attributes that contradict each other."""
        side, heads, kv_heads, ffn = self.side, self.heads, self.kv_heads, self.ffn
        if self.dim % heads:
            raise UsageError(
                f"--{side}-embed-dim {self.dim} is not divisible by --{side}-attention-heads {heads}: change one"
            )
        if kv_heads is not None and heads % kv_heads:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UsageError(
                f"--{side}-kv-heads {kv_heads} must be a divisor of --{side}-attention-heads {heads}: use {divisors}"
            )
        if self.relative_values and self.relative_positions is None:
            raise UsageError("--relative-values requires a distance: add --relative-positions K, or omit it")
        if self.positions == "rotary" and self.dim // heads % 2:
            raise UsageError(
                f"--rotary-positions requires an even head width, not {self.dim // heads} ({side}): "
                f"change --{side}-attention-heads or --{side}-embed-dim"
            )
        if ffn in GATED and self.activation not in ("relu", GATED[ffn]):  # relu is fairseq's default
            raise UsageError(
                f"--ffn {ffn} has its own activation function, {GATED[ffn]}: omit --activation-fn {self.activation}"
            )
        if not 0 <= (self.alignment_layer or 0) < max(self.layers, 1):
            last = self.layers - 1
            raise UsageError(f"--alignment-layer {self.alignment_layer} must be in [0, {last}], a layer of the decoder")
        if not 1 <= (self.alignment_heads or 1) <= heads:
            raise UsageError(f"--alignment-heads {self.alignment_heads} must be in [1, {heads}], heads of the decoder")
        if side == "encoder" and self.memory is not None:
            raise UsageError(f"memory requires a decoder ({self.memory.name}): omit it")
        if self.offload and not self.recompute:
            raise UsageError("offload requires recompute: set both, or omit it")

    @property
    def methods(self) -> list[MethodConfig]:
        """Chosen methods."""
        chosen = (self.aggregator, self.init, self.residual, self.attention, self.memory)
        return [choice for choice in chosen if choice is not None]

    @property
    def encoder_layers(self) -> int:
        return self.layers if self.side == "encoder" or self.other_layers is None else self.other_layers

    @property
    def decoder_layers(self) -> int:
        return self.layers if self.side == "decoder" or self.other_layers is None else self.other_layers

    @property
    def parallel_attention(self) -> bool:
        """Whether both attentions of a decoder layer are one sub-layer."""
        return self.attention is not None and self.attention.method.parallel

    @property
    def packs(self) -> bool:
        """Whether attention uses a packed sequence."""
        return self.attention is not None and self.attention.method.packs

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Sub-layers of each layer: of "self", "cross", "merged" and "ffn"."""
        if self.side == "encoder":
            attentions = ["self"]
        elif self.parallel_attention:
            attentions = ["merged"]
        else:
            attentions = ["self", "cross"] if self.cross_attention else ["self"]
        return (*attentions, *(["ffn"] if self.layout.feed_forward else []))

    @property
    def modules_per_layer(self) -> int:
        """Number of modules per layer."""
        return len(self.sublayers) if self.layout.split else 1

    @property
    def num_modules(self) -> int:
        """Number of modules in all layers, and of reads and writes of the aggregator."""
        return self.layers * self.modules_per_layer
