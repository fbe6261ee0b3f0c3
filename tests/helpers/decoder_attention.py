"""Models with random parameters, with every --decoder-attn."""

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


def random_model(build, arch, deviation=0.5, **flags):
    """A narrow model with random parameters, in fp64; tables keep their start."""
    model = build(arch, **flags).double()
    encoder, decoder = model.encoder, model.decoder
    for part in (encoder.layers, encoder.aggregator, encoder.memory, encoder.packed, encoder.language_transform,
                 decoder.layers, decoder.aggregator):  # fmt: skip
        if part is not None:
            shake(part, deviation)
    decoder.need_attn = False  # where they are asked for, weights are of fp32
    return model
