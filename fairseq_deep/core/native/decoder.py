"""Decoding steps of whole decoders in compiled kernels: layers, caches, and scores of tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from .layers import describe_layer
from .library import load
from .packed import pointer, runs_native
from .structures import DecoderStruct, Described, KeysStruct, Reads, StepStruct, Unsupported

FIRST = 32  # positions that a search has room for at first


class NativeDecoder:
    """A decoder with all layers in compiled kernels; searches and threads share it.

    Args:
        decoder: the decoder, in evaluation mode
        reads: notes the attributes that the kernels depend on

    Attributes:
        layers: structures of the layers
        struct: structure of the whole decoder, if each layer reads the one below; else None

    Raises:
        Unsupported: the kernels do not support it
    """

    def __init__(self, decoder: nn.Module, reads: Reads):
        if reads(decoder, "training") or reads(decoder, "need_attn") or reads(decoder, "compiled") is not None:
            raise Unsupported
        modules = reads(decoder, "layers")
        self.layers = [describe_layer(reads(modules, name), reads) for name in modules._modules]
        if not self.layers:
            raise Unsupported
        attention = decoder.layers[0].self_attn
        self.heads, self.rotary = (attention.kv_heads, attention.head_dim), attention.rotary
        self._addresses = (ctypes.c_void_p * len(self.layers))(*map(ctypes.addressof, self.layers))
        self.struct, self._reads = self._whole(decoder, reads), reads  # which owns the weights

    def _whole(self, decoder: nn.Module, reads: Reads) -> DecoderStruct | None:
        changes = any(reads(decoder, name) is not None for name in ("project_in_dim", "project_out_dim", "quant_noise"))
        drops = reads(reads(decoder, "dropout_module"), "apply_during_inference")
        if changes or drops or not reads(decoder, "aggregator").running_sum:
            return None
        struct = DecoderStruct(ctypes.addressof(self._addresses), len(self.layers))
        struct.embedding, struct.scale = reads.address(reads(decoder, "embed_tokens"), "weight"), decoder.embed_scale
        struct.embedding_norm = reads.norm(decoder, "layernorm_embedding")
        struct.final_norm, struct.output = reads.norm(decoder, "layer_norm"), reads.linear(decoder, "output_projection")
        return struct


_described = Described(NativeDecoder)


def find_decoder(decoder: nn.Module, memory: Tensor | None) -> NativeDecoder | None:
    """Return *decoder* in kernels; None if they do not support it, or its *memory*."""
    if memory is None or decoder.caches is None or not runs_native(memory):
        return None
    return _described(decoder)


class NativeState:
    """State of incremental decoding in compiled kernels; see :class:`~fairseq_deep.core.decoding_state.DecodingState`.

    Caches hold the keys of all hypotheses of each sentence, and never move. Each hypothesis has a list of the slots
    that it sees, and each sentence has a place.

    Args:
        native, decoder: the decoder, twice
        source: the encoded batch, with the :func:`padding_bias` of its memory if there is padding
        beam: largest number of hypotheses per sentence
    """

    def __init__(self, native: NativeDecoder, decoder: nn.Module, source, beam: int):
        self._native, self._decoder, self._library = native, decoder, load()
        self._slots, self._sources = beam, source.memory.size(1)
        self._capacity, self._target, self._order = 0, torch.empty(0), torch.empty(0)
        self._step, self._before = StepStruct(self._sources, beam), (torch.empty(0), torch.empty(0))
        self._keys = (KeysStruct * len(native.layers))()
        size = ctypes.sizeof(KeysStruct)
        places = (ctypes.addressof(self._keys) + index * size for index in range(len(native.layers)))
        self._places = (ctypes.c_void_p * len(native.layers))(*places)
        self._kept = self._keep(source)

    def _keep(self, source) -> list[Tensor]:
        """Compute the keys and values of the source; return the tensors that hold them."""
        if not self._native.layers[0].source.heads:
            return []
        memories = source.memories or [source.memory]
        length, (heads, dim) = memories[0].size(0), self._native.heads
        room = torch.empty(len(self._keys), 2, self._sources, heads, length, dim)
        kept, bias, threads = [room], source.padding, ctypes.c_int64(torch.get_num_threads())
        if bias is not None:
            kept.append(bias := bias.float().contiguous())
        for index, (keys, layer, own) in enumerate(zip(self._keys, self._native.layers, room)):
            keys.source_keys, keys.source_values = own[0].data_ptr(), own[1].data_ptr()
            keys.sources, keys.source_length = self._sources, length
            if bias is not None:
                keys.source_bias, keys.bias_stride = bias.data_ptr(), bias.stride(0)
            memory = memories[index % len(memories)].contiguous()
            self._library.keep_memory(ctypes.byref(layer), pointer(memory), ctypes.byref(keys), threads)
        return kept

    def step(self, words: Tensor) -> tuple[Tensor, None]:
        """Return scores of all tokens (B x V), and no attention weights.

        Args:
            words: the newest token of each hypothesis, B

        Raises:
            IndexError: a first token is not in the dictionary; a search only chooses tokens in it
        """
        entries = self._decoder.embed_tokens.num_embeddings
        if self._step.length == 0 and int(words.max()) >= entries:
            raise IndexError(f"a token exceeds the {entries} entries of the dictionary")
        step, position = self._advance(words.numel()), self._decoder.position_row(self._step.length + 1)
        if self._native.struct is None:
            scores = self._by_layer(step, words, position)
        else:
            scores, words = torch.empty(words.numel(), self._native.struct.output.outputs), words.contiguous()
            self._library.decoder_step(
                ctypes.byref(self._native.struct), ctypes.byref(step), self._places, pointer(words),
                None if position is None else pointer(position), pointer(scores),
            )  # fmt: skip
        self._step = step
        return scores, None

    def _by_layer(self, step: StepStruct, words: Tensor, position: Tensor | None) -> Tensor:
        x, aggregator = self._decoder.embed(words.unsqueeze(1), position), self._decoder.aggregator
        state = aggregator.start(x)
        for index, layer in enumerate(self._native.layers):
            x = aggregator.read(state, index).contiguous()
            y, structs = torch.empty_like(x), (layer, step, self._keys[index])
            self._library.decoder_layer_step(*map(ctypes.byref, structs), pointer(x), pointer(y))
            state = aggregator.write(state, index, y)
        return self._decoder.output_layer(self._decoder.finish(aggregator.finish(state), None))[:, -1]

    def _advance(self, rows: int) -> StepStruct:
        """Return the next step of *rows* hypotheses, with room in the caches."""
        before = self._step
        if before.length == self._capacity:
            self._grow(before.length)
        beam = rows // self._sources if before.length == 0 else self._slots
        seen = torch.empty(rows, self._capacity, dtype=torch.int32)
        places = torch.empty(rows // beam, dtype=torch.int64)
        step = StepStruct(rows // beam, beam, 0, torch.get_num_threads(), 0, seen.data_ptr(), self._capacity,
                          places.data_ptr())  # fmt: skip
        if self._native.rotary is not None:
            self._rotation = self._native.rotary.at(before.length)
            step.cos, step.sin = (each.data_ptr() for each in self._rotation)
        order = None if before.length == 0 else pointer(self._order)
        self._library.next_step(ctypes.byref(before), ctypes.byref(step), order, ctypes.c_int64(self._slots))
        self._before, self._order = (seen, places), torch.arange(rows)  # the step has the addresses of the first two
        return step

    def _grow(self, length: int) -> None:
        """Double the room for positions, of which *length* are in use."""
        self._capacity = max(FIRST, 2 * length)
        heads, dim = self._native.heads
        room = torch.empty(len(self._keys), 2, self._sources, heads, self._capacity * self._slots, dim)
        if length:
            room[..., : length * self._slots, :] = self._target[..., : length * self._slots, :]
        self._target = room
        for keys, own in zip(self._keys, room):
            keys.target, keys.to_values, keys.capacity = own.data_ptr(), own.stride(0), own.size(3)

    def reorder(self, order: Tensor) -> None:
        """Continue with the hypotheses *order*; all of one sentence stay together."""
        self._order = order.contiguous()
