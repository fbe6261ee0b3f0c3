"""Decoders with every --decoder-attn: how to choose them; models with random parameters."""

from tests.helpers.models import POSTNORM, PRENORM
from tests.helpers.tensors import shake

# --decoder-attn, and the flags that choose it
KINDS = {
    "self": {},
    "average": {"decoder_attn": "average"},
    "average-ffn": {"decoder_attn": "average", "average_ffn": True},
    "merged": {"decoder_attn": "merged"},
    "merged-self": {"decoder_attn": "merged-self"},
    "merged-average": {"decoder_attn": "merged-average"},
    "merged-average-ffn": {"decoder_attn": "merged-average", "average_ffn": True},
    "ssru": {"decoder_attn": "ssru"},
}
# Luna, whose decoder reads more than layers of the others do
LUNA = {"decoder_attn": "luna", "encoder_attn": "luna", "luna_length": 3}
# how layers are connected, and where norms are: an architecture and further flags
STACKS = {
    "postnorm": (POSTNORM, {}),
    "another width": (POSTNORM, {"encoder_embed_dim": 24}),
    "prenorm": (PRENORM, {}),
    "dlcl-post": ("transformer_dlcl_postnorm_2l2l_tiny", {}),
    "dlcl-pre": ("transformer_dlcl_2l2l_tiny", {}),
    "lstm": ("transformer_lstm_2l2l_tiny", {}),
    "rnn": ("transformer_lstm_2l2l_tiny", {"layer_agg": "rnn"}),
}


def make_model(build, kind, stack, **flags):
    """A narrow model with random parameters, in fp64."""
    name, options = STACKS[stack]
    model = build(name, **{"decoder_layers": 3, **options, **{**KINDS, "luna": LUNA}[kind], **flags}).double()
    parts = [model.decoder.layers, model.decoder.aggregator]
    if model.encoder.packed is not None:
        parts += [part for part in (model.encoder.packed, model.encoder.layers, model.encoder.memory) if part]
    for module in parts:
        shake(module, 0.5)
    model.decoder.need_attn = False  # its weights are of fp32
    return model
