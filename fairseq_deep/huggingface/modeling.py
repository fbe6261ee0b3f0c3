"""The core's Transformer as a transformers model."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from fairseq_deep.core.residuals.branchnorm import GrowingBranch
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.model import untrained

from .configuration import FairseqDeepConfig
from .generation import LENGTHS, DecoderCache, EndAtLimit, check_penalty, longest_of, search_settings
from .storage import Storage

IGNORED = -100
"""The label of positions to ignore."""
CACHE = "cache" if "cache" in [each.name for each in fields(Seq2SeqLMOutput)] else "past_key_values"
"""The name of the cache in outputs, which transformers 5.24 renamed."""


@dataclass
class EncoderOutput(BaseModelOutput):
    """The encoder's output, batch first.

    Attributes:
        last_hidden_state: B x S x C
        padding: true at padding positions of the source, B x S
        memories: the states that each decoder layer attends to, if layers have separate memories, B x M x S x C
        languages: indices of the target languages, if the decoder's norms depend on them, B
    """

    padding: Tensor | None = None
    memories: Tensor | None = None
    languages: Tensor | None = None


class _Encoder(nn.Module):
    """The encoder with the arguments and outputs that ``generate()`` expects."""

    def __init__(self, model: FairseqDeepForConditionalGeneration):
        super().__init__()
        self.encode = model.encode

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> EncoderOutput:
        """See :meth:`FairseqDeepForConditionalGeneration.encode`."""
        return self.encode(input_ids, attention_mask, output_hidden_states)


class FairseqDeepForConditionalGeneration(Storage, Transformer, PreTrainedModel, GenerationMixin):
    """A packaged model with transformers' interface; it supports all methods of fairseq_deep.

    Parameters have the core's names. The core's functions, such as ``BeamSearch``, also accept this model.

    Args:
        config: configuration of a package. ``AutoConfig.from_pretrained`` gives an untrained model with its settings
            and dictionaries

    Raises:
        UsageError: *config* is incomplete
    """

    config: FairseqDeepConfig
    config_class = FairseqDeepConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: FairseqDeepConfig):
        PreTrainedModel.__init__(self, config)
        self.files: dict[str, bytes] = {}
        config.check()  # settings may have changed
        tags = self._read_dictionaries(config)
        sizes = config.source_vocab_size, config.vocab_size
        flags = Namespace(arch=config.package["arch"], **config.package["model"])
        core = untrained(flags, *(Dictionary(map(str, range(size - len(Dictionary())))) for size in sizes))
        self.encoder, self.decoder = core.encoder, core.decoder
        self.encoder.main_input_name = self.main_input_name  # generate() reads it
        self.decoder.caches = self.decoder.find_caches()  # once, not per step
        if self.encoder.language_index is not None and tags:
            self.encoder.language_index.set_tags(tags)
        self.post_init()
        positions = self.encoder.max_positions(), self.decoder.max_positions()
        self.generation_config = search_settings(config.package["search"], *positions)

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since the core initialises all weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward() creates the cache

    def train(self, mode: bool = True) -> FairseqDeepForConditionalGeneration:
        """Begin training, or end it.

        Raises:
            UsageError: a branch is below its full size; only ``fairseq-train`` increases it
        """
        for part in self.modules() if mode else ():
            if isinstance(part, GrowingBranch) and float(part.scale) < 1:
                raise UsageError(
                    f"branches grow only in fairseq-train ({part.place} is at {float(part.scale):.3g} of its size): "
                    "train there until they have their full size, or use another --residual"
                )
        return super().train(mode)

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embedding."""
        return self.encoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the output projection."""
        return self.decoder.output_projection

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Reject another vocabulary size."""
        raise UsageError("the package's dictionaries fix the vocabulary; train a model with other dictionaries")

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the encoder with transformers' interface."""
        return _Encoder(self)

    def get_decoder(self) -> nn.Module:
        """Return the core's decoder."""
        return self.decoder

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_hidden_states: bool | None = None
    ) -> EncoderOutput:
        """Run the encoder.

        Args:
            input_ids: B x S, with end-of-sentence, padded on either side
            attention_mask: 0 at positions to ignore, B x S; padding is ignored in any case

        Raises:
            UsageError: the source is longer than the model's positions
        """
        limit = self.encoder.max_positions()
        if input_ids.size(1) > limit:
            raise UsageError(f"a source has {input_ids.size(1)} tokens, but the model {limit} positions; truncate it")
        encoded = self.encoder(_masked(input_ids, attention_mask), None, bool(output_hidden_states))
        memories, languages = encoded.get("encoder_memories"), encoded.get("languages")
        return EncoderOutput(
            last_hidden_state=encoded["encoder_out"][0].transpose(0, 1),
            hidden_states=tuple(state.transpose(0, 1) for state in encoded["encoder_states"]) or None,
            padding=encoded["encoder_padding_mask"][0],
            memories=torch.stack(memories).permute(2, 0, 1, 3) if memories else None,
            languages=languages[0] if languages else None,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: DecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: DecoderCache | None = None,
    ) -> Seq2SeqLMOutput | tuple:
        """Compute the scores of all target tokens.

        Args:
            input_ids, attention_mask: see :meth:`encode`
            decoder_input_ids: B x T, starting with end-of-sentence; with *cache*, the new positions. Consecutive
                hypotheses of a sentence may share its *encoder_outputs*
            decoder_attention_mask: 0 at positions to ignore, B x T
            encoder_outputs: output of :meth:`encode`, instead of *input_ids*; padding in it or in *attention_mask* is
                ignored
            labels: target tokens with end-of-sentence, B x T; padding and -100 are ignored
            use_cache: return a cache and decode position by position
            cache, past_key_values: the cache, by its name since transformers 5.24 and by its earlier name

        Returns:
            ``logits`` (B x T x V), with labels ``loss`` (the mean cross-entropy), ``cache`` (before transformers 5.24,
            ``past_key_values``), hidden states on request, and the encoder's output

        Raises:
            UsageError: an input is missing or not supported
        """
        if output_attentions:
            raise UsageError("output_attentions is not supported; fairseq-generate prints alignments")
        encoder_outputs = self._read_source(input_ids, attention_mask, encoder_outputs, output_hidden_states)
        if decoder_input_ids is None:
            if labels is None:
                raise UsageError("forward() requires decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        encoded = self._encoded(encoder_outputs, attention_mask)
        tokens = _masked(decoder_input_ids, decoder_attention_mask)
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DecoderCache(self.decoder)
        decode = self._whole if cache is None else self._steps
        features, states = decode(tokens, encoded, cache)
        logits = self.decoder.output_layer(features)
        output = Seq2SeqLMOutput(
            loss=None if labels is None else _loss(logits, labels),
            logits=logits,
            **{CACHE: cache},
            decoder_hidden_states=tuple(s.transpose(0, 1) for s in states) if output_hidden_states else None,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
        )
        return output.to_tuple() if return_dict is False else output

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the decoder's input for *labels* (B x T): end-of-sentence, then all labels except the last."""
        words = labels.masked_fill(labels.eq(IGNORED), Dictionary.pad)
        return torch.cat([words.new_full((len(words), 1), Dictionary.eos), words[:, :-1]], dim=1)

    def _read_source(self, input_ids: Tensor | None, mask: Tensor | None, outputs, hidden: bool | None):
        """Return the encoder's output, or *outputs* if given."""
        if outputs is None and input_ids is None:
            raise UsageError("forward() requires input_ids or encoder_outputs")
        if outputs is None:
            return self.encode(input_ids, mask, hidden)
        return outputs if isinstance(outputs, BaseModelOutput) else EncoderOutput(*outputs[:2])

    def _encoded(self, outputs: BaseModelOutput, mask: Tensor | None) -> dict[str, list[Tensor]]:
        """Return the encoder's output in the core's form."""
        x, padding, memories = outputs.last_hidden_state, outputs.get("padding"), outputs.get("memories")
        if padding is None:
            padding = x.new_zeros(x.shape[:2], dtype=torch.bool) if mask is None else mask.eq(0)
        encoded = {"encoder_out": [x.transpose(0, 1)], "encoder_padding_mask": [padding]}
        if self.encoder.memory is not None:
            if memories is None:
                raise UsageError("encoder_outputs lacks the memories of the decoder's layers; use encode()'s output")
            encoded["encoder_memories"] = [memory.transpose(0, 1) for memory in memories.unbind(1)]
        if self.decoder.stack.language_norm:
            if outputs.get("languages") is None:
                raise UsageError("encoder_outputs lacks the target languages; use encode()'s output")
            encoded["languages"] = [outputs["languages"]]
        return encoded

    def _whole(self, tokens: Tensor, encoded: dict[str, list[Tensor]], cache: None) -> tuple[Tensor, list[Tensor]]:
        """Return features of all positions of *tokens* (B x T), and hidden states."""
        copies = len(tokens) // len(encoded["encoder_padding_mask"][0])
        if copies > 1:
            encoded = {
                name: [value.repeat_interleave(copies, dim=int(value.dim() == 3)) for value in values]
                for name, values in encoded.items()
            }
        x, extra = self.decoder.extract_features(tokens, encoded, alignment_layer=-1)
        return x, extra["inner_states"]

    def _steps(self, tokens: Tensor, encoded: dict[str, list[Tensor]], cache: DecoderCache) -> tuple[Tensor, list]:
        """Decode the new positions of *tokens* (B x T) one by one, and return features and hidden states."""
        if tokens.size(1) > 1 and bool(tokens.eq(Dictionary.pad).any()):
            raise UsageError("decoder_input_ids of several positions must not be padded with a cache; remove padding")
        features, states = zip(*(cache.extend(words, encoded) for words in tokens.unbind(1)))
        return torch.cat(features, dim=1), [torch.cat(layer) for layer in zip(*states)]

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **model_kwargs
    ):
        """Repeat the inputs for each hypothesis, except the encoder's output, which hypotheses share."""
        shared = {name: model_kwargs.pop(name, None) for name in ("encoder_outputs", "attention_mask")}
        options = {"expand_size": expand_size, "is_encoder_decoder": False, "input_ids": input_ids}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(**options, **model_kwargs)
        return input_ids, {**model_kwargs, **shared}

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, generation_config=None, logits_processor=None, **kwargs):
        """Translate with the package's search settings, which the arguments override; see transformers' ``generate()``.

        The default length limit is the runtime's, which depends on the source.

        Raises:
            UsageError: transformers does not support the package's search
        """
        search = self.config.package["search"]
        config = {} if generation_config is None else {"generation_config": generation_config}
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in LENGTHS}
        check_penalty(search, {**kwargs, **config})
        own = [getattr(generation_config, name, None) for name in LENGTHS]
        lengths = {*own, *(getattr(self.generation_config, name) for name in LENGTHS)}
        unset = lengths <= {None, getattr(self.generation_config, "ceiling", None)} and not kwargs.keys() & {*LENGTHS}
        source = kwargs.get("input_ids", inputs)
        if source is None and kwargs.get("encoder_outputs") is not None:
            source = kwargs["encoder_outputs"][0]
        if source is not None and unset:
            longest = longest_of(search, source.size(1), self.decoder.max_positions())
            kwargs["max_length"] = longest + 2  # the first symbol and end-of-sentence count
            logits_processor = LogitsProcessorList([*(logits_processor or []), EndAtLimit(longest)])
        return super().generate(inputs, logits_processor=logits_processor, **config, **kwargs)


def _masked(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return *tokens* with padding where *mask* is 0."""
    return tokens if mask is None else tokens.masked_fill(mask.eq(0), Dictionary.pad)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the *labels*, except padding and ignored ones."""
    labels = labels.to(logits.device).masked_fill(labels.eq(IGNORED), Dictionary.pad)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=Dictionary.pad)
