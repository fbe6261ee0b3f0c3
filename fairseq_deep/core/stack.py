"""Immutable description of a stack of layers, from which methods and layers are built.

``description.py`` converts flags to descriptions. A description with only sizes is enough to use a method by itself:
``Dlcl(Stack(layers=6, dim=512))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    """

    name: str
    method: Any
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, *args) -> Any:
        """Build the method with its options."""
        return self.method(*args, **self.options)


@dataclass(frozen=True)
class Stack:
    """Description of one stack of a Transformer.

    Attributes:
        layers: depth
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
        layout: the structure of the layers
        aggregator, init, residual, attention, memory: the methods; None if a part is built separately
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
