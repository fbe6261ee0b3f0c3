"""The decoder: embedding, layers connected by an aggregator, final norm, output projection."""

from typing import Dict, List, Optional, Tuple

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from fairseq_deep.core.attention import Ancestry, MultiheadAttention, RunningMean, Step
from fairseq_deep.core.attention.beam_reorder import Order
from fairseq_deep.core.attention.masks import can_ask, check_later, future_mask, padding_bias, product_type
from fairseq_deep.core.decoding import CompiledSteps, unpack_linear
from fairseq_deep.core.layers import LayerDrop, wrap_layer
from fairseq_deep.core.registry import UsageError

from .checkpoints import keep_final_norm
from .layer_building import build_layer


class DeepTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder with our layers and an aggregator between them.

    Where the aggregator does the rest, a layer is its attentions alone.
    The aggregator combines the layers of one position, so that incremental decoding needs no state for it.

    Attributes:
        stack: its description
        stock: the layers are fairseq's own, for the two kinds of attention that ours have not
        init: how its weights start
        layers: the M decoder layers, or the modules of their sub-layers
        layer_drop: which of them run
        history: the aggregator that connects them
        ancestry: which hypotheses belong together in beam search
        pads_right: targets are padded on the right
        aligns: training wants attention weights, too
        alignment_layer, alignment_heads: layer and number of heads (0: all) whose attention weights are returned
        followers: in generation, the modules that keep something of hypotheses, in the order of their steps
        compiled: what runs the steps of incremental decoding, if that is not :meth:`run_step` (:meth:`compile_steps`)
        need_attn: return attention weights where no *alignment_layer* is named, in the steps of generation, too
    """

    __jit_ignored_attributes__ = ["followers"]
    stock: torch.jit.Final[bool]  # a constant, so that TorchScript compiles one of two calls of a layer

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn=False, output_projection=None):
        self.stack = cfg.stacks["decoder"]
        self.stock = bool(cfg.cross_self_attention or cfg.decoder.xformers_att_config)
        self.init = self.stack.init.build(self.stack)
        self._next_layer = 0
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        split = (layer if self.stack.layout.split else [layer] for layer in self.layers.children())
        self.layers = nn.ModuleList(part for layer in split for part in layer)
        self.num_layers = len(self.layers)
        self.layer_drop = LayerDrop(self.stack.layerdrop, self.num_layers)
        self.modules_per_layer = self.stack.modules_per_layer
        self.source_offset = self._source_offset()
        self.history = self.stack.aggregator.build(self.stack)
        if not self.stack.layout.final_norm:
            self.layer_norm = None
        self.pads_right = getattr(cfg, "left_pad_target", None) is False
        self.aligns = bool(getattr(cfg, "load_alignments", False))
        layer = getattr(cfg, "alignment_layer", None)
        self.alignment_layer = self.num_layers // self.modules_per_layer - 1 if layer is None else layer
        self.alignment_heads = 0 if layer is None else (getattr(cfg, "alignment_heads", None) or 1)
        self.need_attn = True
        self.compiled = self.followers = None
        parts = list(self.layers.modules())
        self.ancestry = Ancestry(
            attends=any(isinstance(part, MultiheadAttention) and not part.of_memory for part in parts),
            averages=any(isinstance(part, RunningMean) for part in parts),
        )
        self.relative = self.ancestry.attends and self.stack.relative_positions is not None

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        if self.stock:
            return wrap_layer(TransformerDecoderLayerBase(cfg, no_encoder_attn), cfg)
        self._next_layer += 1
        parts = [wrap_layer(part, cfg) for part in build_layer(self.stack, self.init, self._next_layer)]
        return nn.ModuleList(parts) if self.stack.layout.split else parts[0]

    def _source_offset(self) -> int:
        """Index within a layer's modules of the one that attends to the source."""
        names = self.stack.sublayers if self.stack.layout.split else ()
        return max([names.index(name) for name in ("cross", "merged") if name in names], default=0)

    def make_generation_fast_(self, need_attn: bool = False, **kwargs) -> None:
        """What fairseq tells before it generates: whether alignments are wanted."""
        self.need_attn = bool(need_attn)
        if not self.stock:  # a walk over all modules at each step would take a tenth of the time of small batches
            self.followers = [module for module in self.modules() if hasattr(module, "follow")]

    def compile_steps(self, capacity: Optional[int] = None, **options) -> None:
        """Decode with steps that ``torch.compile`` takes whole, over caches of a fixed capacity.

        Args:
            capacity: room for so many target positions, of which more are refused; None doubles it where needed
            options: of ``torch.compile``

        Raises:
            UsageError: this torch cannot compile, or the layers are fairseq's own
        """
        if self.stock:
            raise UsageError(
                "steps of fairseq's own layers cannot be compiled: leave out --cross-self-attention, or this"
            )
        self.compiled = CompiledSteps(type(self).run_step, capacity, **options)
        unpack_linear(self)

    def embed(self, tokens, positions: Optional[Tensor]):
        """Embedding output y_0 (T x B x C) of *tokens* (B x T) at *positions* (B x T x C)."""
        x = self.embed_scale * self.embed_tokens(tokens.contiguous())
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if positions is not None:
            x = x + positions
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x).transpose(0, 1).contiguous()

    def masks(
        self, tokens, like: Tensor, causal: bool, full_context_alignment: bool
    ) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        """Masks of self-attention, None where nothing has to be masked.

        Args:
            tokens: B x T
            like: has the type and the device of what is made
            causal, full_context_alignment: positions see no later ones, or all; neither in a step of generation

        Returns:
            for the padding, B x T or what attention makes of it; and for later positions, T x T or, where that hides
            padding, too, B x 1 x T x T. None of the latter leaves it to the layers to be causal.
        """
        padding: Optional[Tensor] = None
        if causal or full_context_alignment:
            padding = self._seen_padding(tokens, causal)
        elif self.cross_self_attention or bool(tokens.eq(self.padding_idx).any()):
            padding = tokens.eq(self.padding_idx)
        decoding = not causal and not full_context_alignment
        if decoding or not (self.stock or self.ancestry.attends):
            return padding, None  # an average counts words
        future: Optional[Tensor] = None
        if causal and (self.stock or padding is not None or self.relative):
            # fairseq's layers hide padding with -inf: rows with nothing else to attend to must not become NaN
            hidden = -1e4 if self.stock and padding is not None else float("-inf")
            future = future_mask(tokens.size(1), tokens.size(1), like, hidden)
        if padding is None or self.stock:
            return padding, future
        bias = padding_bias(padding, like.dtype)
        return (bias, None) if future is None else (None, future + bias)

    def _seen_padding(self, tokens, causal: bool) -> Optional[Tensor]:
        """Padding (B x T) of *tokens*, None if no position that is a word can see any."""
        padding = tokens.eq(self.padding_idx)
        if self.cross_self_attention:
            return padding
        # where no position sees later ones, padding on the right needs no mask
        if can_ask(tokens):
            return padding if bool((padding[:, :1] if causal else padding).any()) else None
        if not causal or not self.pads_right:
            return padding
        if tokens.is_cuda:
            check_later(padding[:, 0] <= padding[:, -1], "targets are padded on the left: use --left-pad-target")
        return None

    def extract_features_scriptable(
        self,
        prev_output_tokens,
        encoder_out: Optional[Dict[str, List[Tensor]]],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
    ):
        """Features of a batch; the contract is that of fairseq's ``TransformerDecoderBase.extract_features``.

        Args:
            prev_output_tokens: B x T; with *incremental_state* only the last column is computed
            encoder_out: the encoder's dictionary
            incremental_state: the attentions' caches
            full_context_alignment: let positions see later ones
            alignment_layer: layer whose attention to the source is returned (default: ``--alignment-layer``, or the
                last; in training none, unless the task loads alignments)
            alignment_heads: number of heads to average it over (default: ``--alignment-heads``, or all)

        Returns:
            B x T x C, and a dictionary with ``attn`` [B x T x S] and ``inner_states`` y_0 ... y_M
        """
        if alignment_layer is None:
            wanted = (self.need_attn or incremental_state is None) and (self.aligns or not self.training)
            alignment_layer = self.alignment_layer if wanted else -1
            if alignment_heads is None and self.alignment_heads > 0:
                alignment_heads = self.alignment_heads
        aligned = alignment_layer * self.modules_per_layer + self.source_offset if alignment_layer >= 0 else -1
        enc: Optional[Tensor] = None
        enc_padding: Optional[Tensor] = None
        if encoder_out is not None and len(encoder_out["encoder_out"]) > 0:
            enc = encoder_out["encoder_out"][0]
        if encoder_out is not None and len(encoder_out["encoder_padding_mask"]) > 0:
            enc_padding = encoder_out["encoder_padding_mask"][0]
        memories: List[Tensor] = []
        if encoder_out is not None and "encoder_memories" in encoder_out:
            memories = encoder_out["encoder_memories"]

        positions: Optional[Tensor] = None
        if self.embed_positions is not None:
            positions = self.embed_positions(prev_output_tokens, incremental_state=incremental_state)
        if incremental_state is not None:
            words = prev_output_tokens[:, -1:].contiguous()
            if positions is not None:
                positions = positions[:, -1:]
            state = incremental_state
            if torch.jit.is_scripting():
                x, attn, states = self.run_step(state, words, positions, enc, enc_padding, memories, aligned)
            else:
                inputs = (state, words, positions, enc, enc_padding, memories, aligned)
                x, attn, states = self.run_step(*inputs) if self.compiled is None else self.compiled(self, *inputs)
        else:
            x = self.embed(prev_output_tokens, positions)
            causal = not full_context_alignment
            like = x if self.stock else x.new_empty(0, dtype=product_type(x))
            padding, mask = self.masks(prev_output_tokens, like, causal, full_context_alignment)
            if enc_padding is not None and not self.stock:
                enc_padding = padding_bias(enc_padding, like.dtype)
            causal = causal and mask is None
            x, attn, states = self.run_layers(x, enc, enc_padding, memories, None, mask, padding, None, aligned, causal)

        if attn is not None:
            if alignment_heads is not None:
                attn = attn[:alignment_heads]
            attn = attn.mean(dim=0)
        return x, {"attn": [attn], "inner_states": states}

    def run_step(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        words,
        positions: Optional[Tensor],
        enc: Optional[Tensor],
        enc_padding: Optional[Tensor],
        memories: List[Tensor],
        aligned: int,
    ) -> Tuple[Tensor, Optional[Tensor], List[Optional[Tensor]]]:
        """A step of incremental decoding, which asks the device nothing; see :meth:`run_layers`.

        Args:
            words: B x 1
            positions: 1 x 1 x C or B x 1 x C, what is added to their embeddings
        """
        x = self.embed(words, positions)
        padding: Optional[Tensor] = None
        mask: Optional[Tensor] = None
        step: Optional[Step] = None
        if self.stock:
            padding, mask = self.masks(words, x, False, False)
        else:
            sources = enc.size(1) if enc is not None else x.size(1)
            step = self.ancestry(incremental_state, sources, x, words.ne(self.padding_idx))
        return self.run_layers(x, enc, enc_padding, memories, incremental_state, mask, padding, step, aligned)

    def run_layers(
        self,
        x: Tensor,
        enc: Optional[Tensor],
        enc_padding: Optional[Tensor],
        memories: List[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
        mask: Optional[Tensor],
        padding: Optional[Tensor],
        step: Optional[Step],
        aligned: int,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], List[Optional[Tensor]]]:
        """Features (B x T x C), weights of the attention to the source (H x B x T x S) or None, and y_0 ... y_M.

        Args:
            x: y_0, T x B x C
            enc, enc_padding: the encoder's output (S x B x C) and its padding (B x S)
            memories: what the layers attend to, where it is not *enc*
            mask, padding: what :meth:`masks` gives
            step: in a step of incremental decoding, what the attentions share
            aligned: index of the module whose attention weights are wanted; -1 for none
            causal: no position sees later ones, without a *mask* that says so
        """
        attn: Optional[Tensor] = None
        states: List[Optional[Tensor]] = [x]
        history = self.history.start(x)
        runs = self.layer_drop()
        for index, layer in enumerate(self.layers):
            if runs[index]:
                wants_attn = index == aligned
                x = self.history.read(history, index)
                if self.stock:
                    x, layer_attn, _ = layer(
                        x,
                        enc,
                        enc_padding,
                        incremental_state,
                        self_attn_mask=mask,
                        self_attn_padding_mask=padding,
                        need_attn=wants_attn,
                        need_head_weights=wants_attn,
                    )
                else:
                    x, layer_attn, _ = layer(
                        x,
                        enc if len(memories) == 0 else memories[index // self.modules_per_layer],
                        enc_padding,
                        incremental_state,
                        self_attn_mask=mask,
                        self_attn_padding_mask=padding,
                        need_attn=wants_attn,
                        need_head_weights=wants_attn,
                        step=step,
                        causal=causal,
                    )
                history = self.history.write(history, index, x)
                if (index + 1) % self.modules_per_layer == 0:
                    states.append(self.history.layer_output(history, x))
                if layer_attn is not None and wants_attn:
                    attn = layer_attn.float().to(x)
            else:
                history = self.history.skip(history, index)
        x = self.history.finish(history)

        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)  # T x B x C -> B x T x C
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, attn, states

    def reorder_incremental_state_scripting(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ):
        """Take over the hypotheses *new_order* (B); what that does to the caches is decided once for all of them."""
        order = self.ancestry.reorder(incremental_state, new_order)
        if torch.jit.is_scripting():
            known = False
        else:
            known = self._follow(incremental_state, order)
        if known:
            return
        for module in self.modules():
            if hasattr(module, "follow") and order is not None:
                module.follow(incremental_state, order)
            elif hasattr(module, "reorder_incremental_state"):  # fairseq's own attention
                module.reorder_incremental_state(incremental_state, new_order)

    @torch.jit.unused
    def _follow(self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], order: Optional[Order]) -> bool:
        """Let those follow that generation knows to; whether it knows."""
        if self.followers is not None and order is not None:
            for module in self.followers:
                module.follow(incremental_state, order)
        return self.followers is not None

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        keep_final_norm(state_dict, name)
        state_dict = super().upgrade_state_dict_named(state_dict, name)
        if self.adaptive_softmax is not None:  # fairseq adds one to every decoder that shares its embeddings
            state_dict.pop(f"{name}.output_projection.weight", None)
        return state_dict
