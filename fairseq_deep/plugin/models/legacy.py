"""Models of the original DLCL code (a fork of fairseq 0.5.0): its architecture names and its flags.

The names work as ``--arch`` and, like the flags, in checkpoints. The keys of such checkpoints are renamed by
``checkpoints.py``.
"""

import argparse
from typing import Any

_TOY = {
    f"{side}_{flag}": value
    for side in ("encoder", "decoder")
    for flag, value in (("embed_dim", 64), ("ffn_embed_dim", 64), ("attention_heads", 4))
}

# original name: (our name, flags that differ)
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dlcl_transformer": ("transformer_dlcl_postnorm_6l", {}),
    "dlcl_transformer_postnorm_wmt_en_de": ("transformer_dlcl_postnorm_6l", {}),
    "dlcl_transformer_postnorm_deep_wmt_en_de": ("transformer_dlcl_postnorm_25l", {}),
    "dlcl_transformer_prenorm_wmt_en_de": ("transformer_dlcl_6l", {}),
    "dlcl_transformer_prenorm_deep_wmt_en_de": ("transformer_dlcl_30l", {}),
    "dlcl_transformer_iwslt_de_en": ("transformer_dlcl_postnorm_3l3l_small", {}),
    "dlcl_transformer_prenorm_iwslt_de_en": ("transformer_dlcl_3l3l_small", {}),
    "dlcl_transformer_toy": ("transformer_dlcl_postnorm_3l3l_small", _TOY),
}
# the fork's second implementation of the same method, with the same presets
ALIASES.update({f"simple_{name}": target for name, target in list(ALIASES.items())})
ALIASES["transformer_prenorm_wmt_en_de"] = ("transformer_prenorm_6l", {})
ALIASES["transformer_prenorm_deep_wmt_en_de"] = ("transformer_prenorm_20l", {})


def translate_flags(args: argparse.Namespace) -> None:
    """Set our DLCL flags from the original code's flags in *args*, the flags of a checkpoint.

    The original ``history_window_size`` masks only the initial values of weights that are not normalised: such a model
    reads all entries, so it needs no window here. With normalised weights it is a mask, like ours.
    """
    normalize = getattr(args, "normalize_learned_weight", False)
    learned = getattr(args, "encoder_learnable", True) or getattr(args, "decoder_learnable", True)
    window = getattr(args, "history_window_size", -1)
    ours = {
        "dlcl_init": getattr(args, "init_value", None),
        "dlcl_weight_type": getattr(args, "weight_type", None),
        "dlcl_dropout": getattr(args, "history_dropout", None),
        "dlcl_normalize": True if normalize else None,
        "dlcl_window": window if normalize and window > 0 else None,
        "dlcl_fixed": None if learned else True,
    }
    for flag, value in ours.items():
        if value is not None and getattr(args, flag, None) is None:
            setattr(args, flag, value)
