"""Supervised alignments: one cross-attention learns word alignments while the model learns to translate.

Jointly Learning to Align and Translate with Transformer Models, Garg et al., EMNLP 2019, as in fairseq's
``transformer_align``. With A_h the weights of head h of one decoder layer's cross-attention (T x S), and G the
alignments in the data, each row divided by its number of links, the loss is

    L_a = - sum_{t,s} G_ts log( 1/H' sum_{h<=H'} A_h,ts ).

The criterion ``label_smoothed_cross_entropy_with_alignment`` adds lambda L_a to the loss (``--alignment-lambda``).

Names here: ``alignment_layer`` is the layer, counted from 0; ``alignment_heads`` is H'. With
``full_context_alignment`` the weights come from a second pass of the decoder, in which each position sees the whole
target.
"""

from typing import Any

from .registry import UsageError
from .stack import Stack


def add_args(parser) -> None:
    """Add the flags of fairseq's ``transformer_align``, without defaults."""
    parser.add_argument("--alignment-layer", type=int, metavar="N",
                        help="index of the decoder layer with supervised alignments in cross-attention, from 0")
    parser.add_argument("--alignment-heads", type=int, metavar="N",
                        help="number of attention heads averaged for alignments (default: 1)")
    parser.add_argument("--full-context-alignment", action="store_true",
                        help="compute alignments in a second decoder pass over the whole target")


def check_alignment(flags: Any, decoder: Stack) -> None:
    """Reject alignment flags that the decoder does not support.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    layer, heads = getattr(flags, "alignment_layer", None), getattr(flags, "alignment_heads", None)
    if layer is None:
        for flag, value in (("heads", heads), ("full-context", getattr(flags, "full_context_alignment", None))):
            if value:
                name = f"--alignment-{flag}" if flag == "heads" else f"--{flag}-alignment"
                raise UsageError(f"{name} requires --alignment-layer; add it, or omit {name}")
        return
    if getattr(flags, "full_context_alignment", None) and not decoder.attention.method.full_context:
        raise UsageError(
            f"--full-context-alignment is not supported with --decoder-attn {decoder.attention.name}: omit one of them"
        )
    if decoder.packs:
        raise UsageError(
            f"--alignment-layer is not supported with --decoder-attn {decoder.attention.name}, which has no weights "
            "of source tokens: omit one of them"
        )
    if not decoder.cross_attention:
        raise UsageError("--alignment-layer requires cross-attention; omit --no-cross-attention, or this flag")
    if decoder.layerdrop:
        raise UsageError("--alignment-layer requires every decoder layer; omit --decoder-layerdrop, or this flag")
