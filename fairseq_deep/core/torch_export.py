"""Translation as two programs of ``torch.export``: one encodes sentences, one decodes a position of each hypothesis.

Programs are stateless: caches are inputs and outputs. Caches have a fixed capacity, as in compiled decoding
(:class:`~fairseq_deep.core.decoding.CompiledSteps`), so one program can run all steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import HypothesisState, LayerContext, MultiheadAttention
from .attention.beam_reorder import BeamReorder
from .attention.masks import padding_bias
from .decoding import unpack_linear
from .decoding.bfloat import BfloatLinear
from .decoding.int8 import Int8Linear
from .decoding_state import Source
from .languages import of_hypotheses
from .registry import UsageError


class Cache(NamedTuple):
    """Empty cache of one sentence in the decoder's layout, which concatenates sentences in dimension *dim*.

    Outside the programs, sentences have a separate dimension before *dim*. Every size is then either constant or the
    number of sentences, which other compilers require.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    value: float = 0.0

    def of(self, sentences: int, device: torch.device) -> Tensor:
        """Return the empty cache of a number of *sentences*."""
        shape = [*self.shape[: self.dim], sentences, *self.shape[self.dim :]]
        return torch.full(shape, self.value, dtype=self.dtype, device=device)


def _caches(decoder: nn.Module, beam: int, capacity: int) -> dict[str, Cache]:
    """Return the caches of *decoder*, by module name."""
    state, dtype, found = decoder.beam_state, decoder.embed_tokens.weight.dtype, {}
    slots, wide = state._slots(beam), torch.promote_types(dtype, torch.float32)
    if state.attends:
        found["beam_state.mask"] = Cache((1, beam, capacity, slots), 0, dtype, float("-inf"))
    if state.averages:
        found["beam_state.count"] = Cache((1, beam, 1), 1, wide)
    for name, module in decoder.named_modules():
        if isinstance(module, HypothesisState):
            found[f"{name}.{module.field}"] = Cache((1, beam, module.width or decoder.stack.dim), 1, wide)
        elif isinstance(module, MultiheadAttention) and not module.of_memory:
            shape = (2, beam // slots, module.kv_heads, capacity * slots, module.head_dim)
            found[f"{name}.own_cache.cache"] = Cache(shape, 1, dtype)
    return found


class SourceProgram(nn.Module):
    """Module for :func:`export_encoder`."""

    def __init__(self, model: nn.Module, beam: int, capacity: int):
        super().__init__()
        decoder, self.encoder, self.names, self.attentions = model.decoder, model.encoder, [], nn.ModuleList()
        self.caches, self.packs = _caches(decoder, beam, capacity), decoder.packs
        for index, layer in enumerate(decoder.layers):
            for name, module in layer.named_modules():
                if isinstance(module, MultiheadAttention) and module.of_memory:
                    self.names.append((f"layers.{index}.{name}.memory_cache", index // decoder.modules_per_layer))
                    self.attentions.append(module)

    def forward(self, src_tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run the program."""
        encoded = self.encoder(src_tokens)
        memory = encoded["encoder_out"][0]
        source = {"padding": padding_bias(Source.of(encoded, self.packs).padding, memory.dtype)}
        if "languages" in encoded:
            source["languages"] = encoded["languages"][0]
        for (name, layer), attention in zip(self.names, self.attentions):
            own = encoded["encoder_memories"][layer] if encoded.get("encoder_memories") else memory
            key, value, _ = attention.read_memory(own, LayerContext(own))
            source[f"{name}.key"] = key.contiguous()
            if value is not None:
                source[f"{name}.value"] = value.contiguous()
        return source, {name: cache.of(src_tokens.size(0), memory.device) for name, cache in self.caches.items()}


class StepProgram(nn.Module):
    """Module for :func:`export_decoding_step`."""

    def __init__(self, model: nn.Module, beam: int, capacity: int):
        super().__init__()
        self.caches = _caches(model.decoder, beam, capacity)
        self.decoder, self.slots = model.decoder, model.decoder.beam_state._slots(beam)
        embed, table = self.decoder.embed_tokens, self.decoder.embed_positions
        # computed here: other compilers do not support filling a diagonal
        self.register_buffer("own", self.decoder.beam_state._own(self.slots, embed.weight).detach())
        words = torch.full((1, capacity), embed.padding_idx + 1, device=embed.weight.device)
        self.register_buffer("positions", None if table is None else table(words).detach())

    def forward(
        self, words: Tensor, order: Tensor, position: Tensor, source: dict[str, Tensor], caches: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the program."""
        sentences, beam = words.size()
        self._unify(sentences, order, source, caches)
        state = self._state(words, position, source, caches)
        if beam > 1:
            first = torch.arange(0, sentences * beam, beam, device=words.device).unsqueeze(1)
            self._reorder(state, (first + order).flatten())
        positions = None if self.positions is None else self.positions.index_select(1, position)
        languages = of_hypotheses(source["languages"], sentences * beam) if "languages" in source else None
        # attention to the source has its keys, and only checks whether there is a memory
        source = Source(words.t(), None, [], languages)
        x, _, _ = self.decoder.run_step(state, words.view(-1, 1), positions, source, -1)
        updated = {
            name: self._kept(state, name).unflatten(each.dim, (sentences, -1)) for name, each in self.caches.items()
        }
        return self.decoder.output_layer(x).view(sentences, beam, -1), updated

    def _unify(self, sentences: int, order: Tensor, source: dict[str, Tensor], caches: dict[str, Tensor]) -> None:
        """Declare that all inputs have the same number of sentences: otherwise sizes become longer with each layer."""
        torch._check(order.size(0) == sentences)
        for name, tensor in source.items():
            torch._check(tensor.size(0) == sentences)
            torch._check(tensor.dim() < 3 or name == "padding" or tensor.size(2) == source["padding"].size(3))
        for name, cache in self.caches.items():
            torch._check(caches[name].size(cache.dim) == sentences)

    def _key(self, module: str) -> str:
        return self.decoder.get_submodule(module)._state

    def _kept(self, state: dict, name: str) -> Tensor:
        """Return the cache *name* of the incremental state."""
        module, _, field = name.rpartition(".")
        return state[self._key(module)][field]

    def _state(self, words: Tensor, position: Tensor, source: dict[str, Tensor], caches: dict[str, Tensor]) -> dict:
        """Return an incremental state with copies of these tensors, which the step may overwrite."""
        beam_state = self.decoder.beam_state
        state = {beam_state._state: {"mask": words, "own": self.own, "count": None, "position": position.clone()}}
        own = {name: caches[name].clone().flatten(each.dim, each.dim + 1) for name, each in self.caches.items()}
        for name, tensor in {**source, **own}.items():
            module, _, field = name.rpartition(".")
            if module:
                state.setdefault(self._key(module), {"bias": source["padding"]}).update({field: tensor, "buffer": None})
        return state

    def _reorder(self, state: dict, rows: Tensor) -> None:
        """Continue with the hypotheses *rows* without a synchronisation: sentences keep their positions."""
        beam_state, seen = self.decoder.beam_state, None
        saved = state[beam_state._state]
        if beam_state.attends:
            seen = saved["mask"]
            saved["mask"] = seen.flatten(0, 1).index_select(0, rows).view_as(seen)
        if beam_state.averages:
            saved["count"] = saved["count"].index_select(1, rows)
        order = BeamReorder(rows, None, seen if self.slots > 1 else None, False)
        for cache in self.decoder.find_caches():
            cache.reorder(state, order)


def export_encoder(model: nn.Module, beam: int = 1, capacity: int = 64) -> torch.export.ExportedProgram:
    """Export the encoder, including the computation of all inputs of decoding steps from the source.

    This program and the one of :func:`export_decoding_step` must run without gradients.

    Args:
        model: a :class:`~fairseq_deep.core.transformer.Transformer`. The function sets it to evaluation mode and
            removes the packed copies of its weights.
        beam: number of hypotheses per sentence
        capacity: maximum number of target positions

    Returns:
        a program that takes ``src_tokens`` (sentences x S, padded) and returns two dictionaries of tensors. Steps read
        ``source`` and update ``caches``. The number of sentences and S are dynamic.

    Raises:
        UsageError: *capacity* exceeds the model's positions, or its products are specific to this machine
    """
    program, tokens = SourceProgram(_checked(model, capacity), beam, capacity).eval(), _example(model)
    sentences, words = _dims(model)
    return _export(program, (tokens,), ({0: sentences, 1: words},))


def export_decoding_step(model: nn.Module, beam: int = 1, capacity: int = 64) -> torch.export.ExportedProgram:
    """Export a step of incremental decoding, for all positions.

    Args:
        model, beam, capacity: as for :func:`export_encoder`

    Returns:
        a program that takes the following, and returns the scores (sentences x beam x V) and the new ``caches``:

        - ``words``: the last token of each hypothesis, sentences x beam
        - ``order``: the rank (0 ... beam - 1) of each hypothesis within its sentence in the previous step
        - ``position``: the number of earlier tokens (1), less than *capacity*
        - ``source``, ``caches``: output of the program of :func:`export_encoder`

    Raises:
        UsageError: *capacity* exceeds the model's positions, or its products are specific to this machine
    """
    program, tokens = StepProgram(_checked(model, capacity), beam, capacity).eval(), _example(model)
    with torch.no_grad():
        source, caches = SourceProgram(model, beam, capacity)(tokens)
    hypotheses, (sentences, words) = tokens[:, :1].repeat(1, beam), _dims(model)
    inputs = (hypotheses, torch.zeros_like(hypotheses), torch.zeros_like(tokens[0, :1]), source, caches)
    of_source = {name: {0: sentences, 3 if name == "padding" else 2: words} for name in source if name != "languages"}
    if model.decoder.packs:  # packed sources have a fixed number of rows
        of_source = {name: {0: sentences} for name in source}
    if "languages" in source:
        of_source["languages"] = {0: sentences}
    of_caches = {name: {cache.dim: sentences} for name, cache in _caches(model.decoder, beam, capacity).items()}
    return _export(program, inputs, ({0: sentences}, {0: sentences}, None, of_source, of_caches))


def _checked(model: nn.Module, capacity: int) -> nn.Module:
    if not 0 < capacity <= model.decoder.max_positions():
        raise UsageError(f"a capacity of {capacity} positions: choose 1 to {model.decoder.max_positions()}")
    if any(isinstance(module, (BfloatLinear, Int8Linear)) for module in model.modules()):
        raise UsageError("bf16 and int8 products cannot be exported: export the model before reduce_precision")
    unpack_linear(model)
    return model


def _example(model: nn.Module) -> Tensor:
    embed = model.encoder.embed_tokens
    return torch.full((2, 3), embed.padding_idx + 1, device=embed.weight.device)


def _dims(model: nn.Module) -> tuple[torch.export.Dim, torch.export.Dim]:
    """Return the dynamic dimensions: sentences, and tokens in their sources."""
    return torch.export.Dim("sentences", min=1), torch.export.Dim("words", min=2, max=model.encoder.max_positions())


def _export(program: nn.Module, inputs: tuple, shapes: tuple) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return _without_unused(torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False))


def _without_unused(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Remove weights that the program does not read: each program also contains the modules of the other."""
    from torch.export.graph_signature import InputKind

    specs = exported.graph_signature.input_specs
    weights = {spec.arg.name: spec for spec in specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    for node in list(exported.graph.nodes):
        if node.name in weights and not node.users:
            spec = weights[node.name]
            (exported.constants if spec.persistent is False else exported.state_dict).pop(spec.target)
            specs.remove(spec)
            exported.graph.erase_node(node)
    exported.graph_module.recompile()
    return exported
