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

from fairseq_deep.errors import UsageError


def add_args(parser) -> None:
    """Add the flags of fairseq's ``transformer_align``, without defaults."""
    parser.add_argument("--alignment-layer", type=int, metavar="N",
                        help="index of the decoder layer with supervised alignments in cross-attention, from 0")
    parser.add_argument("--alignment-heads", type=int, metavar="N",
                        help="number of attention heads averaged for alignments (default: 1)")
    parser.add_argument("--full-context-alignment", action="store_true",
                        help="compute alignments in a second decoder pass over the whole target")


def check_alignment(flags: Any) -> None:
    """Reject alignment flags without a layer.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    if getattr(flags, "alignment_layer", None) is None:
        for flag in ("alignment_heads", "full_context_alignment"):
            if getattr(flags, flag, None):
                name = f"--{flag.replace('_', '-')}"
                raise UsageError(f"{name} requires --alignment-layer; add it, or omit {name}")
