"""What of a row holds where the user asks for other methods than the row's."""

import pytest

from tests.helpers.flags import parse


@pytest.mark.parametrize("row, flags, left_out, kept", [
    ("lstm_concat_6l", "--layer-agg rnn", ["lstm_merge"], {}),
    ("lstm_1layer_6l", "--encoder-layer-agg dlcl", ["lstm_share"], {"lstm_ffn": 1}),
    ("lstm_1layer_6l", "--decoder-attn average --decoder-embed-dim 256", ["lstm_share"], {}),
    ("lstm_two_6l", "", ["lstm_attn_residual"], {"lstm_merge": "two"}),
    ("lstm_relative_12l_big", "--layer-agg dlcl", ["relative_positions"], {}),
    ("relative_6l", "--layer-agg dlcl", [], {"relative_positions": 16, "relative_values": True}),
    ("b2t_18l18l", "--deep-init xavier", ["ds_init_alpha"], {"residual": "b2t"}),
    ("ode_24l", "--decoder-attn average", ["relative_positions", "relative_values"], {"ode_history": "dlcl"}),
    ("transparent_16l", "--decoder-attn average --deep-init tfixup", [], {"layernorm_embedding": False}),
    ("deepnet_18l18l", "--encoder-layer-agg lstm --encoder-deep-init xavier", [], {"deep_init": "deepnet"}),
    ("modern_6l", "--residual peri", ["encoder_residual"], {"norm": "rms", "ffn": "swiglu"}),
    ("modern_6l", "--relative-positions 4", ["rotary_positions"], {"relative_positions": 4}),
    ("modern_6l", "--encoder-learned-pos", ["rotary_positions"], {"norm": "rms"}),
    ("modern_6l", "--no-token-positional-embeddings", ["rotary_positions"], {"norm": "rms"}),
    ("modern_6l", "--deep-init tfixup --residual plain", ["norm"], {"ffn": "swiglu"}),
    ("modern_6l", "--activation-fn gelu", ["ffn"], {"norm": "rms"}),
])  # fmt: skip
def test_options_of_methods_that_are_replaced_are_left_out(row, flags, left_out, kept):
    args = parse("--arch", f"transformer_{row}", *flags.split())
    assert {flag: getattr(args, flag, None) for flag in left_out} == dict.fromkeys(left_out)
    assert {flag: getattr(args, flag, None) for flag in kept} == kept
