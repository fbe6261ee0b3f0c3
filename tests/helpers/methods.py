"""Small models of every method, as (architecture, flags), by name; for tests that run them all."""

from fairseq_deep.core.description import AXES
from fairseq_deep.core.residuals import RESIDUALS
from tests.helpers.models import POSTNORM, PRENORM, TINY

LSTM, DLCL = "transformer_lstm_2l2l_tiny", "transformer_dlcl_2l2l_tiny"
LSTM_DECODER = {"decoder_layer_agg": "lstm", "decoder_ffn_embed_dim": None}
NO_FFN = {"encoder_ffn_embed_dim": None, "decoder_ffn_embed_dim": None}
# what a method cannot be without
NEEDS = {"msc": {"layer_agg": "msc", "decoder_memory": "msc"}, "lstm": NO_FFN, "rnn": NO_FFN,
         "luna": {"encoder_attn": "luna"}}  # fmt: skip


def methods(inits=False):
    """Each method of each axis; of initialisations, all if *inits*, else those that change what a layer computes."""
    for axis, (registry, _) in AXES.items():
        for name in registry.names():
            method = registry.get(name)
            if not inits and axis == "deep_init" and method.layer_norm and not method.connects:
                continue
            norms = getattr(method, "norms", ("pre",))
            yield f"{axis}-{name}", (PRENORM if "pre" in norms else POSTNORM, {axis: name, **NEEDS.get(name, {})})


def named(rows):
    """{name: (architecture, flags)}."""
    return {
        " ".join([
            name.removeprefix("transformer_").removesuffix("_2l2l_tiny"),
            *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        ]): (name, flags)
        for name, flags in rows
    }  # fmt: skip


METHODS = dict(methods())
# what computes otherwise than the method's default does
_OPTIONS = [
    (DLCL, {"dlcl_weight_type": "vector"}),
    (DLCL, {"dlcl_weight_type": "scalar_4", "dlcl_dropout": 0.1}),
    (DLCL, {"dlcl_window": 2, "dlcl_normalize": True}),
    (DLCL, {"dlcl_fixed": True, "dlcl_no_norm": True}),
    ("transformer_dlcl_postnorm_2l2l_tiny", {}),
    ("transformer_dlcl_postnorm_2l2l_tiny", {"dlcl_norm_first": True}),
    (DLCL, {"dlcl_norm_first": True}),
    (LSTM, {"lstm_merge": "concat", "lstm_attn_residual": False}),
    (LSTM, {"lstm_merge": "two", "lstm_share": "none", "lstm_final_norm": True}),
    (LSTM, {"lstm_share": "gate-encdec", "lstm_ffn": 1}),
    (LSTM, {"lstm_share": "all", "lstm_glu": "gelu"}),
    (LSTM, {"decoder_attn": "merged"}),
    (LSTM, {"layer_agg": "rnn", "lstm_merge": "two", "lstm_share": "all"}),
    (PRENORM, {"relative_positions": 2, **LSTM_DECODER}),
    (DLCL, {"decoder_memory": "layerwise"}),
    (PRENORM, {"layer_agg": "msc", "decoder_memory": "msc", "msc_blocks": 1, "decoder_attn": "merged"}),
    (PRENORM, {"decoder_memory": "transparent", "lstm_merge": "two", **LSTM_DECODER}),
    (PRENORM, {"layer_agg": "mlrf", "mlrf_kind": "ffn"}),
    (PRENORM, {"layer_agg": "mlrf", "mlrf_kind": "multi-hop"}),
    (POSTNORM, {"layer_agg": "mlrf", "mlrf_kind": "mean"}),
    (PRENORM, {"layer_agg": "ode", "ode_method": "rk2-learned"}),
    (PRENORM, {"layer_agg": "ode", "ode_method": "rk2-init", "checkpoint_activations": True}),
    (PRENORM, {"layer_agg": "ode", "ode_method": "ema", "ode_history": "dlcl", "ode_identity": True}),
    (POSTNORM, {"layer_agg": "routing", "routing_kind": "dynamic", "checkpoint_activations": True}),
    (PRENORM, {"layer_agg": "attention-residual", "attention_residual_block": 2}),
    (PRENORM, {"layer_agg": "hyper-connections", "hyper_connections_kind": "manifold"}),
    (POSTNORM, {"layer_agg": "gtrans", "gtrans_group_layers": 2}),
    (POSTNORM, {"layer_agg": "ode", "decoder_memory": "transparent", "decoder_attn": "merged"}),
    (PRENORM, {"layer_agg": "residual-dual", "decoder_attn": "merged"}),
    (LSTM, {"decoder_layer_agg": "residual-dual", "decoder_ffn_embed_dim": 32}),
    (PRENORM, {"layer_agg": "hyper-connections", "sub_norm": True, "norm": "rms", "ffn": "swiglu"}),
    (PRENORM, {"residual": "sdu", "sdu_activation": "tanh", "sdu_layers": 1}),
    (PRENORM, {"decoder_attn": "average", "average_ffn": True}),
    (POSTNORM, {"encoder_attn": "luna", "decoder_attn": "luna", "luna_length": 4, "checkpoint_activations": True}),
    (PRENORM, {"encoder_attn": "luna", "decoder_attn": "luna", "attention_gate": "heads", "sub_norm": True}),
    (POSTNORM, {"encoder_attn": "luna", "decoder_attn": "luna", "encoder_layer_agg": "dlcl", **LSTM_DECODER}),
    (PRENORM, {"encoder_attn": "luna", "decoder_attn": "luna", "layer_agg": "ode", "ode_method": "rk2"}),
    (PRENORM, {"relative_positions": 2, "relative_values": True}),
    (POSTNORM, {"relative_positions": 2, "decoder_attn": "merged-self", "checkpoint_activations": True}),
    (PRENORM, {"rotary_positions": True, "norm": "rms", "ffn": "swiglu", "decoder_kv_heads": 1}),
    (POSTNORM, {"rotary_positions": True, "qk_norm": True, "attention_gate": "features"}),
    (PRENORM, {"sub_norm": True, "norm": "rms", "decoder_attn": "merged"}),
    (PRENORM, {"ffn": "geglu", "attention_gate": "heads", "decoder_kv_heads": 1, "decoder_attn": "merged-self"}),
    (PRENORM, {"value_residual": True, "rotary_positions": True, "decoder_kv_heads": 1}),
    (PRENORM, {"value_residual": True, "layer_agg": "hyper-connections"}),
    (PRENORM, {"value_residual": True, "layer_agg": "lstm", "rotary_positions": True, **NO_FFN}),
    (DLCL, {"value_residual": True, "relative_positions": 2, "checkpoint_activations": True}),
    (DLCL, {"qk_norm": True, "norm": "rms", "rotary_positions": True, "checkpoint_activations": True}),
    (PRENORM, {"share_all_embeddings": True, "layernorm_embedding": True, "decoder_learned_pos": True}),
    ("transformer_prenorm_6l_big_encoder", {"encoder_layers": 2, "decoder_layers": 2, "decoder_memory": "layerwise"}),
]
OPTIONS = named(_OPTIONS)

# --decoder-attn, and the flags that choose it
KINDS = ("self", "average", "average-ffn", "merged", "merged-self", "merged-average", "merged-average-ffn", "ssru")
KINDS = {kind: {"decoder_attn": kind.removesuffix("-ffn"), **({"average_ffn": True} if "ffn" in kind else {})}
         for kind in KINDS}  # fmt: skip
# Luna, whose decoder reads more than layers of the others do
LUNA = {"decoder_attn": "luna", "encoder_attn": "luna", "luna_length": 3}

# forms of residual connections, and the flags that choose them
FORMS_OF_RESIDUALS = {
    "sdu": {},
    "sdu tanh": {"sdu_activation": "tanh"},
    "highway": {},
    "highway attention": {"highway_form": "attention"},
    "b2t": {},
    "peri": {},
    "layerscale": {"layerscale_start": 0.3},
    "branchnorm": {"branchnorm_updates": 10},
    "completep": {"completep_base": 0.6},
    "layernorm-scaling": {},
    "mix-ln": {"mix_ln_layers": 1},
    "mix-ln 2": {"mix_ln_layers": 2},
    "prores": {"prores_period": 5},
    "prores completep": {"prores_period": 5, "prores_around": "completep"},
    "prores layernorm-scaling": {"prores_period": 5, "prores_around": "layernorm-scaling"},
}
FORMS_OF_RESIDUALS = {form: {"residual": form.split()[0], **flags} for form, flags in FORMS_OF_RESIDUALS.items()}
PLACED = [(form, norm) for form in FORMS_OF_RESIDUALS for norm in TINY
          if all(norm in RESIDUALS.get(word).norms for word in {*form.split()} & {*RESIDUALS.names()})]  # fmt: skip

# models that know languages, whose vocabulary has to have tags
LALT, LALN = {"language_transform": True}, {"language_norm": True}
LANGUAGES = {
    "languages memories": (POSTNORM, {**LALT, "decoder_memory": "transparent"}),
    "languages embeddings": (PRENORM, {**LALN, "layernorm_embedding": True}),
    "languages merged": (POSTNORM, {**LALT, **LALN, "decoder_attn": "merged"}),  # the paper's
    "languages bare": ("transformer_hyper_connections_6l", LALN),
    "languages lstm": (LSTM, {**LALT, **LALN}),
    "languages ode": (PRENORM, {**LALN, "layer_agg": "ode", "ode_method": "rk2-learned"}),
}


def structure(row):
    """What a model of the architecture *row* computes with, whatever its depth, size and dropout."""
    options = tuple(option for option in row.options if "dropout" not in option[0])
    return row.norm, row.layer_agg, row.encoder_size is None, options


def depths(name, flags):
    """Flags for a case of `METHODS` or `OPTIONS`: one layer in each stack, unless it is about several layers."""
    several = {"layer_agg", "decoder_memory", "value_residual"} & {*flags} or flags.get("residual") == "mix-ln"
    return {} if several or name not in (PRENORM, POSTNORM) else {"encoder_layers": 1, "decoder_layers": 1}
