"""--decoder-attn, alignments and options of layers that do not go together, or have no such value."""

from tests.helpers.models import POSTNORM, PRENORM

LSTM, DLCL = "transformer_lstm_6l", "transformer_dlcl_6l"
WITH_MERGED = "is not supported with --decoder-attn merged"
LAYERDROP = {"value_residual": True, "decoder_layerdrop": 0.1}
NO_FFN = {"encoder_ffn_embed_dim": None, "decoder_ffn_embed_dim": None}
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}
REFUSED = [
    (POSTNORM, {"decoder_attn": "mergd"}, "unknown --decoder-attn mergd (did you mean merged?); choose from average"),
    (POSTNORM, {"average_ffn": True}, "--average-ffn has no effect"),
    (POSTNORM, {"decoder_attn": "merged-self", "average_ffn": True}, "--average-ffn has no effect"),
    (POSTNORM, {"decoder_attn": "merged", "no_cross_attention": True}, f"--no-cross-attention {WITH_MERGED}"),
    (LSTM, {"decoder_attn": "merged-self", "lstm_merge": "concat"}, f"--lstm-merge {WITH_MERGED}-self"),
    (LSTM, {"decoder_attn": "merged-average", "lstm_merge": "two"}, f"--lstm-merge {WITH_MERGED}-average"),
    (LSTM, {"decoder_attn": "merged", "lstm_attn_residual": True}, f"--lstm-attn-residual {WITH_MERGED}"),
    (LSTM, {"decoder_attn": "average", "relative_positions": 2}, "--relative-positions 2 is not supported with --de"),
    (LSTM, {"decoder_attn": "merged", "relative_positions": 2}, f"{WITH_MERGED} (decoder): omit or change"),
    (LSTM, {"decoder_attn": "ssru", "relative_positions": 2}, "with --decoder-attn ssru (decoder): omit or change one"),
    (POSTNORM, {"decoder_attn": "merged", "decoder_embed_dim": 8}, "equal (16 and 8), or use merged-average"),
    (LSTM, {"decoder_attn": "average", "average_ffn": True}, "requires a feed-forward width: omit it with --layer-agg"),
    (POSTNORM, {"decoder_attn": "merged", "deep_init": "deepnet"}, "merged, which has two sub-layers (decoder): use d"),
    (POSTNORM, {"decoder_attn": "merged-average", "decoder_deep_init": "tfixup"}, "merged-average, which has two sub"),
    (DLCL, {"alignment_layer": 6}, "--alignment-layer 6 must be in [0, 5]"),
    (DLCL, {"alignment_layer": -1}, "--alignment-layer -1 must be in [0, 5]"),
    (DLCL, {"alignment_layer": 0, "alignment_heads": 3}, "--alignment-heads 3 must be in [1, 2]"),
    (DLCL, {"alignment_heads": 1}, "--alignment-heads requires --alignment-layer"),
    (DLCL, {"full_context_alignment": True}, "--full-context-alignment requires --alignment-layer"),
    (DLCL, {"alignment_layer": 0, "full_context_alignment": True, "decoder_attn": "ssru"}, "--decoder-attn ssru: omit"),
    (DLCL, {"alignment_layer": 0, "no_cross_attention": True}, "omit --no-cross-attention"),
    (DLCL, {"alignment_layer": 0, "decoder_layerdrop": 0.1}, "omit --decoder-layerdrop"),
    (PRENORM, {"rotary_positions": True, "encoder_attention_heads": 16, "decoder_attention_heads": 16},
     "requires an even head width, not 1 (encoder)"),
    (PRENORM, {"rotary_positions": True, "relative_positions": 2}, "not supported with --relative-positions: omit one"),
    (PRENORM, {"rotary_positions": True, "decoder_learned_pos": True}, "which replaces absolute positions (decoder): "),
    (PRENORM, {"rotary_positions": True, "decoder_attn": "average"}, "--decoder-attn average (decoder): omit"),
    (PRENORM, {"decoder_kv_heads": 3}, "--decoder-kv-heads 3 must be a divisor of --decoder-attention-heads 2: use 1,"),
    (PRENORM, {"decoder_kv_heads": 0}, "--decoder-kv-heads must be a whole number of at least 1 (0)"),
    (PRENORM, {"decoder_kv_heads": 1, "decoder_attn": "merged"}, f"{WITH_MERGED}, which adds values to all heads (de"),
    (PRENORM, {"norm": "rsm"}, "unknown --norm rsm (did you mean rms?); choose from layer, rms"),
    (PRENORM, {"ffn": "swigelu"}, "unknown --ffn swigelu (did you mean swiglu?); choose from plain, swiglu"),
    (PRENORM, {"attention_gate": "head"}, "unknown --attention-gate head (did you mean heads?); choose from heads"),
    (PRENORM, {"ffn": "swiglu", "activation_fn": "gelu"}, "its own activation function, swish"),
    (LSTM, {"ffn": "geglu"}, "--layer-agg lstm, which replaces feed-forward sub-layers"),
    (PRENORM, {"value_residual": True, **ONE_LAYER}, "no effect on stacks of one layer: omit it"),
    (PRENORM, LAYERDROP, "with --value-residual, which requires the values of the first layer (decoder)"),
    (PRENORM, {"value_residual": True, "encoder_layers_to_keep": "0,1"}, "--encoder-layers-to-keep is not supported"),
    (PRENORM, {"value_residual": True, "layer_agg": "ode"}, "evaluates layers more than once (encoder): omit or"),
    (PRENORM, {"value_residual": True, "decoder_attn": "average"}, "--decoder-attn average, which has no"),
    (PRENORM, {"value_residual": True, "decoder_attn": "merged"}, "--decoder-attn merged, which has no"),
    (POSTNORM, {"deep_init": "tfixup", "norm": "rms"}, "which requires no norms (encoder): omit or"),
    (POSTNORM, {"deep_init": "tfixup", "qk_norm": True}, "which requires no norms (encoder): omit or"),
    (POSTNORM, {"deep_init": "tfixup", "sub_norm": True}, "which requires no norms (encoder): omit or"),
]
