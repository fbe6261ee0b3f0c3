"""Common parts of encoder and decoder: embedding, positions, layers, aggregator, final norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention import FirstValues
from .description import complete
from .dropout import Dropout
from .layers import LayerContext, LayerDrop, build_layer, wrap_layer
from .norms import make_norm, normalise
from .positions import LearnedPositions, SinusoidalPositions
from .stack import Stack


class TransformerStack(nn.Module):
    """Base class of :class:`Encoder` and :class:`Decoder`.

    Args:
        stack: description; axes without a method get the plain method
        embed_tokens: embedding of the tokens, with the index of padding

    Attributes:
        stack: the complete description
        init: the initialisation method
        layers: the layers, or if layers are split, the modules of their sub-layers
        layer_drop: chooses the layers that run
        aggregator: the method that connects the layers; checkpoints call it ``history``
        layer_norm: the norm at the end of a pre-norm stack
    """

    def __init__(self, stack: Stack, embed_tokens: nn.Embedding):
        nn.Module.__init__(self)  # not super(): in the plugin, fairseq's classes follow, which take other arguments
        self.stack = stack = complete(stack)
        self.init = stack.init.build(stack)
        self.embed_tokens, self.padding_idx = embed_tokens, embed_tokens.padding_idx
        self.embed_scale = math.sqrt(stack.dim) if stack.scale_embedding else 1.0
        self._build_input()  # parts are built in fairseq's order, so a seed gives the same weights
        self.embed_positions = self._positions()
        self.layernorm_embedding = make_norm(stack) if stack.embedding_norm else None
        self.dropout_module = Dropout(stack.dropout, f"Transformer{stack.side.capitalize()}")  # fairseq's name
        numbers = range(1, stack.layers + 1)
        modules = [module for number in numbers for module in build_layer(stack, self.init, number)]
        self.layers = nn.ModuleList(wrap_layer(module, stack) for module in modules)
        self.num_layers = len(self.layers)
        self.modules_per_layer = stack.modules_per_layer
        self.layer_drop = LayerDrop(stack.layerdrop, self.num_layers)
        normalises = stack.pre_norm and stack.final_norm and stack.layout.final_norm
        self.layer_norm = make_norm(stack) if normalises else None
        self._build_output()
        self.aggregator = stack.aggregator.build(stack)
        self._register_state_dict_hook(_name_history)
        self._register_load_state_dict_pre_hook(_name_aggregator)
        self.register_buffer("version", torch.tensor([3.0]))  # version of fairseq's checkpoint format

    def _build_input(self) -> None:
        """Build modules between the embeddings and the positions."""

    def _build_output(self) -> None:
        """Build modules after the final norm."""

    def _positions(self) -> nn.Module | None:
        kinds = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}
        kind = kinds.get(self.stack.positions)
        return kind and kind(self.stack.dim, self.padding_idx, self.stack.max_positions)

    def finish_embedding(self, x: Tensor, languages: Tensor | None) -> Tensor:
        """Return y_0 for the sum *x* of embeddings and positions, B x T x C: a norm may follow, then dropout."""
        if self.layernorm_embedding is not None:
            x = normalise(self.layernorm_embedding, x, None if languages is None else languages.unsqueeze(1))
        return self.dropout_module(x)

    def run_layers(
        self,
        x: Tensor,
        context: LayerContext,
        memories: Sequence[Tensor] = (),
        aligned: int = -1,
        keeps_states: bool = True,
        layers: Iterable[Any] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Return y_0 ... y_L if *keeps_states*, the final state of the aggregator, and attention weights or None.

        Args:
            x: y_0, T x B x C
            context: inputs shared by all layers
            memories: one memory per layer; empty if all layers attend to the memory of *context*
            aligned: index of the module that returns attention weights (H x B x T x S); -1 for none
            layers: replace the layers of the stack
        """
        aggregator, states, attn = self.aggregator, [x] if keeps_states else [], None
        if self.stack.value_residual:
            context = context._replace(values=FirstValues())
        state, runs = aggregator.start(x), self.layer_drop()
        for index, layer in enumerate(self.layers if layers is None else layers):
            if not runs[index]:
                state = aggregator.skip(state, index)
                continue
            x = aggregator.read(state, index)
            if memories:
                context = context._replace(memory=memories[index // self.modules_per_layer])
            if aggregator.num_evaluations == 1:
                x, weights = layer(x, context, index == aligned)
                attn = weights if index == aligned else attn
            else:
                outputs: list[Tensor] = []
                for _ in range(aggregator.num_evaluations):
                    outputs.append(layer(aggregator.next_input(x, outputs), context)[0])
                x = aggregator.combine(x, outputs)
            state = aggregator.write(state, index, x)
            if keeps_states and (index + 1) % self.modules_per_layer == 0:
                states.append(aggregator.layer_output(state, x))
        return states, state, attn

    def max_positions(self) -> int:
        """Return the maximum number of tokens per sentence."""
        own = self.stack.max_positions
        return own if self.embed_positions is None else min(own, self.embed_positions.max_positions)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)


def _name_history(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    _rename(state, f"{prefix}aggregator.", f"{prefix}history.")


def _name_aggregator(state: dict[str, Any], prefix: str, *others: Any) -> None:
    _rename(state, f"{prefix}history.", f"{prefix}aggregator.")
