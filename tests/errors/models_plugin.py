"""Flags of fairseq's models, sizes, training and presets that do not go together."""

PRENORM, DLCL = "transformer_prenorm_6l", "transformer_dlcl_6l"
TINY = "transformer_dlcl_2l2l_tiny"
NO_FFN = {"encoder_ffn_embed_dim": None, "decoder_ffn_embed_dim": None}
REFUSED = [
    # flags of fairseq's models
    ("transformer_linear_6l", {"encoder_layerdrop": 0.1}, "--encoder-layerdrop is not supported"),
    ("transformer_linear_6l", {"decoder_layerdrop": 0.1, "layer_agg": "linear"}, "--decoder-layerdrop is not"),
    (DLCL, {"encoder_layers_to_keep": "0,2"}, "--encoder-layers-to-keep is not supported"),
    (PRENORM, {"decoder_output_dim": 8, "share_decoder_input_output_embed": True},
     "--decoder-output-dim 8 must be the width of the shared embeddings, 16: omit it"),
    (PRENORM, {"cross_self_attention": True}, "--cross-self-attention is not supported"),
    (PRENORM, {"encoder_xformers_att_config": "{}"}, "--encoder-xformers-att-config is not supported"),
    (PRENORM, {"decoder_xformers_att_config": "{}"}, "--decoder-xformers-att-config is not supported"),
    (PRENORM, {"base_layers": 1}, "--base-layers is not supported"),
    (PRENORM, {"char_inputs": True}, "--char-inputs is not supported"),
    (PRENORM, {"adaptive_softmax_cutoff": "4,8", "tie_adaptive_weights": True},
     "--tie-adaptive-weights requires adaptive inputs"),
    (DLCL, {"decoder_embed_dim": 8, "share_all_embeddings": True}, "--share-all-embeddings requires equal widths"),
    # sizes
    (DLCL, {"encoder_attention_heads": 3}, "--encoder-embed-dim 16 is not divisible"),
    (DLCL, {"encoder_attention_heads": -1}, "--encoder-attention-heads must be a whole number of"),
    (DLCL, {"encoder_layers": -1}, "--encoder-layers must be a whole number of at least 0 (-1)"),
    (DLCL, {"max_target_positions": 0}, "--max-target-positions must be a whole number of at"),
    (DLCL, {"dropout": 2.0}, "--dropout must be a number from 0 to 1 (2.0): change it"),
    (DLCL, {"decoder_layerdrop": float("nan")}, "--decoder-layerdrop must be a number from 0"),
    (PRENORM, {"log_depth_interval": 0}, "--log-depth-interval 0 must be at least 1"),
    # training
    (TINY, {"fp16": True, "ddp_comm_hook": "fp16"}, "--ddp-comm-hook fp16 is not supported with this model"),
    (TINY, {"bf16": True, "ddp_comm_hook": "fp16"}, "omit it"),
    (PRENORM, {"compile": True, "quant_noise_pq": 0.1}, "--compile"),
    (PRENORM, {"compile": True, "quant_noise_scalar": 0.1}, "omit one"),
    (PRENORM, {"compile": True, "checkpoint_activations": True, "offload_activations": True},
     "use --checkpoint-activations"),
    # presets of a row that other methods are asked for with
    ("transformer_deepnet_18l18l", {"decoder_attn": "merged"}, "merged, which has two sub-layers (decoder)"),
    ("transformer_deepnet_18l18l", {"decoder_attn": "merged", "layer_agg": "dlcl"}, "which has two sub-layers"),
    ("transformer_ds_matt_6l", {"deep_init": "deepnet"}, "--decoder-attn merged, which has two"),
    ("transformer_sdu_6l", {"layer_agg": "lstm", **NO_FFN}, "use --residual plain"),
    ("transformer_msc_18l18l", {"layer_agg": "dlcl"}, "use --decoder-memory last"),
    ("transformer_dense_20l", {"layer_agg": "msc"}, "add --decoder-memory msc"),
    ("transformer_peri_18l18l", {"deep_init": "tfixup"}, "use --residual plain"),
]  # fmt: skip
