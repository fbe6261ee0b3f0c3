"""Depth-wise LSTMs, initialisations, decoder memories, residual connections, Luna: what they refuse, and the fix."""

from math import inf, nan

from tests.helpers.methods import LSTM
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import PRENORM as PRE

RNN, DLCL = "transformer_rnn_6l", "transformer_dlcl_postnorm_6l"
MSC = {"decoder_memory": "msc", "layer_agg": "msc"}
TRANSPARENT, LAYERWISE = {"decoder_memory": "transparent"}, {"decoder_memory": "layerwise"}
LUNA = {"encoder_attn": "luna"}
BOTH_LUNA = {**LUNA, "decoder_attn": "luna"}
NO_FFN = {"layer_agg": "lstm", "encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}

REFUSED_LSTM = [
    (LSTM, {"lstm_ffn": 3}, "--lstm-ffn 3 is unknown: use one of 1, 2"),
    (LSTM, {"lstm_share": "some"}, "--lstm-share some is unknown: use one of none, gate, gate-encdec, all"),
    (RNN, {"lstm_share": "gate"}, "gate is unknown without gates (--layer-agg rnn): use one of none, all"),
    (LSTM, {"lstm_forget_bias": nan}, "--lstm-forget-bias"),
    (RNN, {"lstm_forget_bias": 0.0}, "no effect in the RNN, which has no gates: use --layer-agg lstm"),
    (LSTM, {"lstm_dropout": 1.0}, "--lstm-dropout 1.0 must be in [0, 1): change or omit it"),
    (LSTM, {"lstm_dropout": -0.1}, "--lstm-dropout -0.1 must be in [0, 1): change or omit it"),
    (LSTM, {"lstm_hidden": 0}, "--lstm-hidden 0 cannot be halved by the GLU: use an even number"),
    (LSTM, {"lstm_ffn": 1, "lstm_hidden": 64}, "--lstm-hidden is the width of the 2-layer form: omit it, or use"),
    (LSTM, {"lstm_ffn": 1, "lstm_glu": "gelu"}, "--lstm-glu requires the 2-layer form: omit it, or use --lstm-ffn 2"),
    (LSTM, {"lstm_hidden": 33}, "--lstm-hidden 33 cannot be halved by the GLU: use an even number"),
    (LSTM, {"lstm_merge": "two", "lstm_attn_residual": True}, "--lstm-attn-residual has no effect with --lstm-merge"),
    (LSTM, {"lstm_merge": "two", "lstm_attn_residual": False}, "--lstm-no-attn-residual has no effect with --lstm-mer"),
    (LSTM, {"lstm_merge": "two", "lstm_share": "all"}, "--lstm-share all cannot share these: use --lstm-share gate"),
    (LSTM, {"lstm_share": "gate-encdec", "encoder_embed_dim": 24}, "equal widths in both stacks: use --lstm-share"),
    (LSTM, {"lstm_share": "all", "encoder_layer_agg": "rnn"}, "--lstm-share all requires --layer-agg lstm and equal"),
    (LSTM, {"encoder_layers": 0}, "requires layers (encoder): use --encoder-layers 1 or more, or --encoder-layer-agg"),
    (LSTM, {"lstm_merge": "concat", "decoder_layer_agg": "residual"}, "--lstm-merge has no effect on a decoder with"),
    (LSTM, {"lstm_attn_residual": True, "decoder_attn": "merged"}, "--lstm-attn-residual is not supported with --deco"),
    (LSTM, {"encoder_ffn_embed_dim": 32}, "--layer-agg lstm has no feed-forward sub-layer: use --lstm-hidden instead"),
    (LSTM, {"decoder_normalize_before": True}, "--layer-agg lstm has its own norms: use --lstm-final-norm for more"),
    (LSTM, {"activation_fn": "relu"}, "--activation-fn has no effect: --layer-agg lstm has its own: use --lstm-ffn"),
    (LSTM, {"encoder_layerdrop": 0.1}, "--encoder-layerdrop is not supported with --layer-agg lstm, which requires ev"),
    (LSTM, {"decoder_layers_to_keep": "0"}, "with --layer-agg lstm, which requires every layer (decoder): omit or"),
    (LSTM, {"quant_noise_pq": 0.1}, "--quant-noise-pq is not supported with --layer-agg lstm (encoder): omit or chang"),
    (LSTM, {"no_cross_attention": True}, "--no-cross-attention is not supported with --layer-agg lstm (decoder): omit"),
    (LSTM, {"relative_values": True}, "--relative-values requires a distance: add --relative-positions K, or omit it"),
    (LSTM, {"relative_positions": 4, "decoder_attn": "average"}, "--relative-positions 4 is not supported"),
    (DLCL, {"lstm_ffn": 1}, "--lstm-ffn has no effect without --layer-agg lstm or rnn: add that, or omit it"),
    (LSTM, {"encoder_attention_heads": 3}, "16 is not divisible by --encoder-attention-heads 3: change one"),
]
REFUSED_INITS = [
    (POST, {"encoder_deep_init": "lipshitz"}, "unknown --deep-init lipshitz (did you mean lipschitz?); choose from"),
    (POST, {"deep_init": "ds", "ds_init_alpha": 2.0}, "--ds-init-alpha 2.0 is out of range: use a value above 0, up"),
    (POST, {"decoder_deep_init": "ds", "ds_init_alpha": 0.0}, "--ds-init-alpha 0.0 is out of range: use a value"),
    (POST, {"deep_init": "ds", "ds_init_exponent": -0.25}, "--ds-init-exponent -0.25 must be a number >= 0: use 0.25"),
    (POST, {"deep_init": "ds", "ds_init_exponent": inf}, "--ds-init-exponent must be a number (inf): change it"),
    (POST, {"deep_init": "lipschitz", "lipschitz_embeddings": "x"}, "x is unknown: use one of lipschitz, normal"),
    (POST, {"deep_init": "admin", "admin_start": "log"}, "log is unknown: use one of logn, 1, n, profile"),
    (POST, {"deep_init": "depth-scaled", "depth_scaled_kind": "bert"}, "bert is unknown: use marian or gpt2"),
    ("transformer_ds_12l12l", {"deep_init": "xavier", "ds_init_exponent": 0.5}, "no effect without --deep-init ds"),
    (POST, {"deep_init": "deepnet", "admin_start": "n"}, "--admin-start has no effect without --deep-init admin"),
    (POST, {"deep_init": "ds", "depth_scaled_kind": "gpt2"}, "no effect without --deep-init depth-scaled: add that"),
    (POST, {"deep_init": "deepnet", "decoder_normalize_before": True}, "deepnet requires post-norm stacks (decoder)"),
    (PRE, {"encoder_deep_init": "admin"}, "admin requires post-norm stacks (encoder): use a transformer_postnorm"),
    (PRE, {"deep_init": "tfixup"}, "tfixup requires post-norm stacks (encoder): use a transformer_postnorm arch"),
    (DLCL, {"deep_init": "tfixup"}, "tfixup is not supported with --layer-agg dlcl, which has norms (encoder): omit o"),
    (POST, {"deep_init": "rezero", "decoder_layer_agg": "dlcl"}, "--layer-agg dlcl, which has norms (decoder): om"),
    *(
        (LSTM, {"encoder_deep_init": method}, f"--deep-init {method} is not supported with --layer-agg lstm, which rep")
        for method in ("ds", "depth-scaled", "deepnet", "admin", "tfixup", "rezero")
    ),
    (LSTM, {"deep_init": "ds", "encoder_layer_agg": "residual"}, "connections (decoder): use xavier or lipschitz"),
    (POST, {"deep_init": "tfixup", "layernorm_embedding": True}, "with --deep-init tfixup, which requires no norms"),
    (POST, {"deep_init": "rezero", "layernorm_embedding": True}, "with --deep-init rezero, which requires no norms"),
    (POST, {"deep_init": "deepnet", "no_cross_attention": True}, "deepnet, which requires three sub-layers (deco"),
    (POST, {"deep_init": "tfixup", "no_cross_attention": True}, "tfixup, which requires three sub-layers (deco"),
    (POST, {"deep_init": "deepnet", "encoder_layers_to_keep": "0"}, "deepnet, which counts the layers (encoder)"),
    (POST, {"deep_init": "deepnet", "decoder_layers_to_keep": "0"}, "--decoder-layers-to-keep is not supported with"),
    *(
        (POST, {"deep_init": "admin", "admin_start": "profile", f"{side}_layerdrop": 0.2}, f"omit --{side}-layerdrop")
        for side in ("encoder", "decoder")
    ),
]
REFUSED_MEMORIES = [
    (PRE, {"decoder_memory": "transparant"}, "unknown --decoder-memory transparant (did you mean transparent?)"),
    (PRE, {**TRANSPARENT, "transparent_dropout": 1.0}, "--transparent-dropout 1.0 is not a probability: use a value"),
    (PRE, {**TRANSPARENT, "transparent_dropout": -0.1}, "--transparent-dropout -0.1 is not a probability: use a value"),
    (PRE, {"transparent_dropout": 0.2}, "has no effect without --decoder-memory transparent: add that, or omit it"),
    (PRE, {"msc_blocks": 2}, "--msc-blocks has no effect without --layer-agg msc: add that, or omit it"),
    (PRE, {**MSC, "encoder_layer_agg": "dlcl"}, "that --layer-agg dlcl of the encoder does not compute: add --encoder"),
    (PRE, {**MSC, **TRANSPARENT}, "that --decoder-memory transparent does not read: add --decoder-memory msc, or use"),
    (PRE, {**MSC, "decoder_layer_agg": "msc"}, "requires an encoder, and --decoder-layer-agg msc is not supported"),
    (PRE, {**MSC, "msc_blocks": 0}, "--msc-blocks 0 must be at least 1 with --layer-agg msc: use 1 or more"),
    (PRE, {**MSC, "decoder_layers": 0}, "--decoder-layers 0 must be at least 1 with --layer-agg msc: use 1"),
    (PRE, {**MSC, "encoder_layers": 8, "decoder_layers": 6}, "for --layer-agg msc: use --msc-blocks 4, or another"),
    (PRE, {**MSC, "encoder_layerdrop": 0.1}, "--layer-agg msc, which requires every layer (encoder): omit or change"),
    (PRE, {**MSC, "encoder_layers": 0}, "--decoder-memory msc requires layers: use --encoder-layers 1 or more"),
    (PRE, {**LAYERWISE, "decoder_layers": 0}, "layerwise requires layers: use --decoder-layers 1 or more"),
    (PRE, {**TRANSPARENT, "decoder_layerdrop": 0.2}, "transparent, which requires every layer, and attention to the"),
    (PRE, {**TRANSPARENT, "no_cross_attention": True}, "--no-cross-attention is not supported with --decoder-me"),
    (PRE, {**LAYERWISE, "encoder_layers_to_keep": "0"}, "layerwise, which requires every layer, and attention to"),
]
REFUSED_RESIDUALS = [
    (PRE, {"residual": "sdu", "sdu_activation": "sigmod"}, "sigmod is unknown (did you mean sigmoid?): use sigmoid or"),
    (PRE, {"residual": "sdu", "sdu_layers": 0}, "--sdu-layers 0 must be at least 1: use 1 or more, or --residual"),
    (PRE, {"residual": "sdu", "sdu_layers": 3}, "--sdu-layers 3 exceeds the 2 layers: omit it for an SDU in all"),
    (PRE, {"encoder_residual": "sdu", "sdu_layers": 3, "decoder_layers": 4}, "--sdu-layers 3 exceeds the 2 layers"),
    (PRE, {"residual": "highway", "highway_form": "gates"}, "gates is unknown (did you mean gate?): use gate or atten"),
    (PRE, {"residual": "layerscale", "layerscale_start": 0.0}, "--layerscale-start 0.0 must be a positive number: use"),
    (POST, {"residual": "branchnorm", "branchnorm_updates": 0}, "--branchnorm-updates 0 must be at least 1: use 1"),
    *((PRE, {"residual": name}, f"--residual {name} requires post-norm stacks") for name in ("b2t", "branchnorm")),
    *(
        (POST, {"residual": name}, f"--residual {name} requires pre-norm stacks (encoder): use a transformer_prenorm")
        for name in ("peri", "completep", "mix-ln", "layernorm-scaling")
    ),
    *(
        (POST, {"residual": "sdu", "deep_init": name}, f"--deep-init {name}, which has its own residual connections")
        for name in ("admin", "deepnet", "rezero")
    ),
    (PRE, {"residual": "sdu", **NO_FFN}, "with --layer-agg lstm, which replaces residual connections (encoder): use -"),
    (PRE, {"sdu_layers": 1}, "--sdu-layers has no effect without --residual sdu: add that, or omit it"),
    (PRE, {"decoder_residual": "completep", "encoder_completep_base": 2.0}, "no effect without --encoder-residual"),
    (PRE, {"residual": "completep", "completep_base": 0.0}, "must be a positive number (0.0, encoder): use 1, 2 or 6"),
    (PRE, {"residual": "completep", "encoder_completep_base": inf}, "--completep-base must be a number (inf): change"),
    (PRE, {"residual": "completep", "decoder_completep_alpha": 1.1}, "from 0 to 1 (1.1, decoder): omit it for 1"),
    (PRE, {"residual": "completep", "layer_agg": "dlcl"}, "dlcl, which does not add all layers to one sum (encoder): "),
    (PRE, {"residual": "completep", "encoder_layers_to_keep": "0"}, "--residual completep, which counts the layers (e"),
    (PRE, {"residual": "prores", "prores_period": 0}, "--prores-period must be at least 1 (0): use 1 or more"),
    (PRE, {"residual": "prores", "prores_around": "complete"}, "complete is unknown (did you mean completep?): use"),
    (PRE, {"residual": "mix-ln", "mix_ln_layers": 0}, "--mix-ln-layers 0 must be at least 1: use 1 or more, or --resi"),
    (PRE, {"residual": "mix-ln", "mix_ln_layers": 3}, "--mix-ln-layers 3 exceeds the 2 layers of the encoder: use few"),
    (PRE, {"residual": "layernorm-scaling", "deep_init": "ds"}, "--deep-init ds both scale layers by their depth (enc"),
    (
        PRE,
        {"residual": "prores", "prores_around": "layernorm-scaling", "decoder_deep_init": "depth-scaled"},
        "--deep-init depth-scaled both scale layers by their depth (decoder): use --deep-init xavier",
    ),
]
REFUSED_LUNA = [
    (POST, {"decoder_attn": "luna"}, "continues the encoder's packed sequence: add --encoder-attn luna, or use"),
    (POST, {"encoder_attn": "lunar"}, "unknown --encoder-attn lunar (did you mean luna?); choose from luna, self"),
    (POST, {"luna_length": 8}, "--luna-length has no effect without --encoder-attn luna: add that, or omit it"),
    (POST, {**LUNA, "luna_length": 0}, "--luna-length 0 must be at least 1: change or omit it"),
    (POST, {**LUNA, "layer_agg": "residual-dual"}, "that --layer-agg residual-dual replaces: use --encoder-layer-agg"),
    (POST, {**LUNA, **LAYERWISE}, "--decoder-memory layerwise is not supported with --encoder-attn luna: omit one"),
    (POST, {**LUNA, "relative_positions": 4}, "--relative-positions 4 is not supported with --encoder-attn luna ("),
    (POST, {**LUNA, "rotary_positions": True}, "--rotary-positions is not supported with --encoder-attn luna (enco"),
    (POST, {**LUNA, "qk_norm": True}, "--qk-norm is not supported with --encoder-attn luna: omit one of them"),
    (POST, {**LUNA, "encoder_layers_to_keep": "0"}, "with --encoder-attn luna, which requires every layer (encoder)"),
    (POST, {**BOTH_LUNA, "decoder_layerdrop": 0.1}, "with --decoder-attn luna, which requires every layer (decoder)"),
    *(
        (POST, {**LUNA, "deep_init": name}, f"--deep-init {name} has no rule for the packed sequence of --encoder-attn")
        for name in ("deepnet", "tfixup")
    ),
    (POST, {**BOTH_LUNA, "decoder_deep_init": "admin"}, "of --decoder-attn luna: use xavier, ds or lipschitz"),
    (POST, {**BOTH_LUNA, "decoder_kv_heads": 1}, "--decoder-kv-heads is not supported with --decoder-attn luna: omit"),
    (POST, {**BOTH_LUNA, "no_cross_attention": True}, "--no-cross-attention is not supported with --decoder-attn luna"),
    (POST, {**BOTH_LUNA, "decoder_embed_dim": 8}, "make --encoder-embed-dim and --decoder-embed-dim equal (16 and 8)"),
    (POST, {**BOTH_LUNA, "alignment_layer": 0}, "--decoder-attn luna, which has no weights of source tokens: omit"),
    (POST, {**BOTH_LUNA, "encoder_layers": 0}, "luna requires layers: use --encoder-layers 1 or more"),
]
REFUSED = [*REFUSED_LSTM, *REFUSED_INITS, *REFUSED_MEMORIES, *REFUSED_RESIDUALS, *REFUSED_LUNA]
