"""Flags of models with every --decoder-attn, and of stacks that have it."""

from tests.helpers.models import POSTNORM, PRENORM

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
