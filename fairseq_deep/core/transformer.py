"""Encoder and decoder as one model."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from torch import Tensor, nn

from .checks import check_stacks
from .decoder import Decoder
from .decoding import pack_linear
from .description import SIDES, complete
from .encoder import Encoder
from .inits.walk import initialise
from .registry import UsageError
from .stack import Stack

_KEYS = {side: side for side in SIDES}

def token_embedding(size: int, dim: int, padding_idx: int) -> nn.Embedding:
    """Build an embedding of *size* tokens, N(0, 1/C); zeros for padding."""
    table = nn.Embedding(size, dim, padding_idx)
    nn.init.normal_(table.weight, std=dim**-0.5)
    nn.init.zeros_(table.weight[padding_idx])
    return table


def _joined(stacks: dict[str, Stack]) -> dict[str, Stack]:
    """Return complete *stacks*, each with the sizes of the other stack, after all checks."""
    if not isinstance(stacks, dict) or {key: getattr(stack, "side", None) for key, stack in stacks.items()} != _KEYS:
        raise UsageError('stacks must be {side: Stack(..., side=side) for side in ("encoder", "decoder")}: change them')
    found = {}
    for side, other in zip(SIDES, reversed(SIDES)):
        sizes = {"other_layers": stacks[other].layers, "memory_dim": stacks["encoder"].dim}
        for name, size in sizes.items():
            if getattr(stacks[side], name) not in (None, size):
                problem = f"{name} of the {side} must be {size}, like the other stack ({getattr(stacks[side], name)})"
                raise UsageError(f"{problem}: omit it")
        found[side] = complete(replace(stacks[side], **sizes))
    check_stacks(found)
    return found


class Transformer(nn.Module):
    """Encoder-decoder model with a choice of connections between its layers.

    Args:
        encoder, decoder: the two stacks

    Attributes:
        full_context_alignment: compute alignments in a second pass of the decoder over the whole target
    """

    full_context_alignment = False

    def __init__(self, encoder: Encoder, decoder: Decoder):
        nn.Module.__init__(self)  # see TransformerStack
        self.encoder, self.decoder = encoder, decoder
        self.tie()

    @classmethod
    def build(cls, stacks: dict[str, Stack], source_size: int, target_size: int | None = None, padding_idx: int = 1):
        """Build and initialise a model.

        Args:
            stacks: the descriptions of "encoder" and "decoder"
            source_size: vocabulary size of the source
            target_size: vocabulary size of the target; None: source and target share one embedding
            padding_idx: index of padding in both

        Raises:
            UsageError: the stacks contradict each other
        """
        stacks = _joined(stacks)
        source = token_embedding(source_size, stacks["encoder"].dim, padding_idx)
        target = source
        if target_size is not None:
            target = token_embedding(target_size, stacks["decoder"].dim, padding_idx)
        model = cls(Encoder(stacks["encoder"], source, stacks["decoder"]), Decoder(stacks["decoder"], target))
        initialise(model, model.encoder.init, model.decoder.init)
        return model

    def tie(self) -> None:
        """Share parameters of the aggregators between the stacks."""
        self.encoder.aggregator.tie(self.decoder.aggregator)
        self.decoder.aggregator.tie(self.encoder.aggregator)

    def __prepare_scriptable__(self) -> NoReturn:
        """Reject ``torch.jit.script``, which calls this method.

        Raises:
            UsageError: always
        """
        raise UsageError("torch.jit.script is not supported: use torch.export, or fairseq-deep export --format torch")

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None,
        prev_output_tokens: Tensor,
        return_all_hiddens: bool = True,
        features_only: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict]:
        """Run both stacks; see :meth:`Encoder.forward` and :meth:`Decoder.forward`."""
        encoded = self.encoder(src_tokens, src_lengths, return_all_hiddens)
        options = {"features_only": features_only, "alignment_layer": alignment_layer}
        options["alignment_heads"] = alignment_heads
        x, extra = self.decoder(prev_output_tokens, encoded, **options)
        if self.full_context_alignment and (self.decoder.aligns or not self.training):
            options.update(features_only=True, full_context_alignment=True)
            extra["attn"] = self.decoder(prev_output_tokens, encoded, **options)[1]["attn"]
        return x, extra

    def prepare_for_decoding(self, need_attn: bool = False) -> Transformer:
        """Merge and pack matrices for decoding; training is not possible afterwards.

        Args:
            need_attn: steps return attention weights
        """
        self.eval()
        for name, module in list(self.named_modules()):
            if module is not self and hasattr(module, "make_generation_fast_"):  # fairseq's model also has one
                module.make_generation_fast_(name=name, need_attn=need_attn)
        pack_linear(self)
        return self

    def aliases(self) -> dict[str, str]:
        """Return the decoder's names of aggregator parameters that both stacks share, with the encoder's names."""
        names = {id(p): f"encoder.history.{name}" for name, p in self.encoder.aggregator.named_parameters()}
        own = self.decoder.aggregator.named_parameters()
        return {f"decoder.history.{name}": names[id(p)] for name, p in own if id(p) in names}

    def state_dict(self, *args, **kwargs):
        """Return the parameters by name; shared parameters of the aggregators only have the encoder's name."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for alias in self.aliases():
            state.pop(prefix + alias, None)
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for alias, name in self.aliases().items():  # torch also requires the decoder's names
            if prefix + name in state_dict:
                state_dict[prefix + alias] = state_dict[prefix + name]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
