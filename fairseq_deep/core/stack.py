"""What a stack of layers is: one immutable description, which methods and layers are built from.

Flags become descriptions in one place, ``description.py``. A description with numbers alone is enough to use a
method by itself: ``Dlcl(Stack(layers=6, dim=512))``.
"""

from __future__ import annotations

import warnings
from dataclasses import InitVar, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """What an aggregator makes of the layers of its stack.

    Attributes:
        residual: sub-layers have residual connections; else the aggregator does all additions
        feed_forward: layers have their feed-forward sub-layer
        attention_bias: the projections of attentions have biases
        input_norm: sub-layers without residual connection normalise their input
        merge: where a decoder layer is its two attentions: "add" their outputs or "concat" them
        attn_residual: there, the query of the second attention has the layer's input added
        split: each sub-layer is a module of its own, after which the aggregator acts (*bare* sub-layers)
        final_norm: a pre-norm stack has its norm after the last layer
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
    calls: InitVar[int | None] = None  # the name of num_evaluations in the last release

    def __post_init__(self, calls: int | None) -> None:
        if calls is not None:
            warnings.warn("Layout(calls=...) is now called num_evaluations", FutureWarning, stacklevel=3)
            object.__setattr__(self, "num_evaluations", calls)


@dataclass(frozen=True)
class MethodConfig:
    """A method that was chosen on one axis.

    Attributes:
        name: as registered
        method: its class
        options: the constructor's arguments that its flags set
    """

    name: str
    method: Any
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, *args) -> Any:
        """An instance of the method."""
        return self.method(*args, **self.options)


@dataclass(frozen=True)
class Stack:
    """One stack of a Transformer.

    Attributes:
        layers: its depth
        dim: its width C
        pre_norm: sub-layers normalise their input (with a norm after the stack), not the sum that they end with
        side: "encoder" or "decoder"
        ffn_dim, heads: width of the feed-forward sub-layers, number of attention heads
        other_layers: depth of the other stack; None: the same
        memory_dim: (decoder) width of what it attends to; None: its own
        cross_attention: (decoder) layers attend to a source
        dropout, attention_dropout, activation_dropout: probabilities
        activation: name of the feed-forward sub-layer's activation function
        max_positions: greatest number of tokens in a sentence
        positions: absolute ones, "sinusoidal", "learned" or "none"; "rotary": rotations in self-attention
        scale_embedding: embeddings are multiplied with sqrt(C)
        embedding_norm: a norm follows embeddings and positions
        final_norm: a pre-norm stack has a norm after its last layer
        output_dim: (decoder) width before the output projection; None: C
        tied_output: (decoder) the output projection is the embedding
        relative_positions: largest distance K of relative positions; None for none
        relative_values: these have vectors for the values, too
        norm: kind of the norms of layers and stack, "layer" or "rms"
        ffn: kind of feed-forward sub-layer, "plain", "swiglu" or "geglu"
        kv_heads: number of attention heads for keys and values; None: as many as for queries
        qk_norm: queries and keys of a head are normalised
        attention_gate: what a gate multiplies in the output of attention, "heads" or "features"; None: there is none
        sub_norm: a norm stands before the last matrix of each sub-layer, too
        value_residual: self-attentions above the first layer also read that layer's values
        languages: number of target languages with a tag in the source dictionary
        language_transform: the encoder's output is transformed by a matrix of the target language
        language_norm: the norms of layers and stack have gains and biases of each target language
        recompute: activations are computed again in the backward pass
        offload: until then, the inputs of layers wait in the CPU's memory
        layerdrop: probability with which a layer is left out in training
        pads_right: (decoder) targets are padded on the right, never on the left
        aligns: (decoder) training needs attention weights, too
        alignment_layer: (decoder) layer whose attention weights are returned, counted from 0; None: the last
        alignment_heads: (decoder) heads that they are averaged over; None: all
        layout: what the aggregator makes of the layers
        aggregator, init, residual, attention, memory: the methods; None where a part is built by itself
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

    @property
    def methods(self) -> list[MethodConfig]:
        """The methods that are chosen."""
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
        """Both attentions of a decoder layer are one sub-layer."""
        return self.attention is not None and self.attention.method.parallel

    @property
    def packs(self) -> bool:
        """Attention is through a packed sequence."""
        return self.attention is not None and self.attention.method.packs

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The sub-layers of a layer: of "self", "cross", "merged" and "ffn"."""
        if self.side == "encoder":
            attentions = ["self"]
        elif self.parallel_attention:
            attentions = ["merged"]
        else:
            attentions = ["self", "cross"] if self.cross_attention else ["self"]
        return (*attentions, *(["ffn"] if self.layout.feed_forward else []))

    @property
    def modules_per_layer(self) -> int:
        """How many modules make up a layer."""
        return len(self.sublayers) if self.layout.split else 1

    @property
    def num_modules(self) -> int:
        """Number of modules of all layers: how often the aggregator is read and written."""
        return self.layers * self.modules_per_layer
