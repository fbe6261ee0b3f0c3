"""Flags that mean nothing for, or contradict, depth-wise LSTMs end with one line: the flag, and what to do instead."""

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.core.aggregators.lstm import DepthwiseLstm, DepthwiseRnn
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.flags import one_line, parse
from tests.helpers.lstm import make
from tests.helpers.methods import LSTM as TINY

RNN = "transformer_rnn_6l"


@pytest.mark.parametrize(
    "name, flags, problem, cure",
    [
        (TINY, {"encoder_layers": 0}, "--layer-agg lstm requires layers (encoder)", "use --encoder-layers 1 or"),
        (TINY, {"lstm_ffn": 3}, "--lstm-ffn 3 is unknown", "use one of 1, 2"),
        (TINY, {"lstm_ffn": 0}, "--lstm-ffn 0 is unknown", "use one of 1, 2"),
        (TINY, {"lstm_glu": "tanh"}, "--lstm-glu tanh is unknown", "use one of sigmoid, gelu, swish, relu"),
        (TINY, {"lstm_merge": "sum"}, "--lstm-merge sum is unknown", "use one of add, concat, two"),
        (TINY, {"lstm_share": "some"}, "--lstm-share some is unknown", "use one of none, gate, gate-encdec, all"),
        (RNN, {"lstm_share": "gate"}, "--lstm-share gate is unknown without gates", "use one of none, all"),
        (RNN, {"lstm_share": "gate-encdec"}, "(--layer-agg rnn)", "use one of none, all"),
        (TINY, {"lstm_ffn": 1, "lstm_hidden": 64}, "--lstm-hidden is the width of the 2-layer", "use --lstm-ffn 2"),
        (TINY, {"lstm_ffn": 1, "lstm_glu": "gelu"}, "--lstm-glu requires the 2-layer form", "use --lstm-ffn 2"),
        (TINY, {"lstm_hidden": 33}, "--lstm-hidden 33 cannot be halved", "use an even number"),
        (TINY, {"lstm_hidden": 0}, "--lstm-hidden 0 cannot be halved", "use an even number"),
        (TINY, {"lstm_hidden": -4}, "--lstm-hidden -4 cannot be halved", "use an even number"),
        (TINY, {"lstm_dropout": 1.0}, "--lstm-dropout 1.0 must be in [0, 1)", "change or omit it"),
        (TINY, {"lstm_dropout": -0.1}, "--lstm-dropout -0.1 must be in [0, 1)", "omit it"),
        (
            TINY,
            {"lstm_merge": "two", "lstm_attn_residual": True},
            "--lstm-attn-residual has no effect with --lstm-merge two",
            "omit it",
        ),
        (
            TINY,
            {"lstm_merge": "two", "lstm_attn_residual": False},
            "--lstm-no-attn-residual has no effect with --lstm-merge two",
            "omit it",
        ),
        (RNN, {"lstm_forget_bias": 0.0}, "--lstm-forget-bias has no effect in the RNN", "use --layer-agg lstm"),
        (RNN, {"lstm_forget_bias": 1.0}, "--lstm-forget-bias has no effect in the RNN", "use --layer-agg lstm"),
        *(
            (
                TINY,
                {"lstm_merge": merge, "lstm_share": share},
                f"--lstm-merge {merge} gives the decoder its own gates, and --lstm-share {share} cannot share these",
                "use --lstm-share gate or none",
            )
            for merge in ("concat", "two")
            for share in ("gate-encdec", "all")
        ),
        *(
            (TINY, {"lstm_share": share, flag: value}, f"--lstm-share {share} requires", "use --lstm-share gate")
            for share, flag, value in (
                ("gate-encdec", "encoder_layer_agg", "dlcl"),
                ("gate-encdec", "encoder_embed_dim", 24),
                ("all", "encoder_layer_agg", "rnn"),
                ("all", "encoder_layer_agg", "residual"),
                ("all", "decoder_embed_dim", 24),
            )
        ),
        *(
            (name, {flag: value}, f"--{flag.replace('_', '-')}", "use --")
            for name in (TINY, RNN)
            for flag, value in (("encoder_ffn_embed_dim", 32), ("decoder_ffn_embed_dim", 32))
        ),
        (TINY, {"encoder_normalize_before": True}, "--encoder-normalize-before has no effect", "--lstm-final-norm"),
        (TINY, {"decoder_normalize_before": True}, "--decoder-normalize-before has no effect", "--lstm-final-norm"),
        (TINY, {"activation_fn": "relu"}, "--activation-fn has no effect", "use --lstm-ffn and --lstm-glu"),
        *(
            (TINY, {f"{side}_{flag}": value}, f"of the {side}", f"omit --{side}-{flag.replace('_', '-')}")
            for side in ("encoder", "decoder")
            for flag, value in (("layerdrop", 0.1), ("layers_to_keep", "0"))
        ),
        (TINY, {"quant_noise_pq": 0.1}, "--quant-noise-pq is not supported with the layers of", "omit it"),
        (TINY, {"no_cross_attention": True}, "--no-cross-attention is not supported", "--decoder-layer-agg residual"),
        (TINY, {"relative_positions": 0}, "--relative-positions must be a whole number of at least 1 (0)", "change it"),
        (RNN, {"relative_positions": -1}, "--relative-positions must be a whole number of at least 1 (-1)", "change"),
        (TINY, {"relative_values": True}, "--relative-values requires a distance", "add --relative-positions K"),
        (TINY, {"relative_positions": 4, "decoder_attn": "average"}, "--relative-positions is", "omit one of"),
        ("transformer_dlcl_6l", {"lstm_ffn": 1}, "--lstm-ffn has no effect without --layer-agg", "add that"),
        ("transformer_dlcl_6l", {"lstm_final_norm": True}, "--lstm-final-norm has no effect without", "omit it"),
        (TINY, {"dlcl_window": 2}, "--dlcl-window has no effect without --layer-agg dlcl", "omit it"),
        (TINY, {"encoder_attention_heads": 3}, "--encoder-embed-dim 16 is not divisible by", "change one"),
    ],
)
def test_flags_that_clash(build, name, flags, problem, cure):
    with pytest.raises(UsageError) as error:
        build(name, **flags)
    assert problem in one_line(error)
    assert cure in one_line(error)


LSTM = ("--arch", "transformer_lstm_6l")
PLAIN = ("--arch", "transformer_prenorm_6l")


@pytest.mark.parametrize(
    "line, problem, cure",
    [
        ((*LSTM, "--decoder-ffn-embed-dim", "1024"), "--decoder-ffn-embed-dim", "use --lstm-hidden"),
        ((*LSTM, "--encoder-ffn-embed-dim", "2048"), "--encoder-ffn-embed-dim", "use --lstm-hidden"),
        ((*LSTM, "--encoder-normalize-before"), "--encoder-normalize-before", "use --lstm-final-norm"),
        ((*LSTM, "--decoder-normalize-before"), "--decoder-normalize-before", "use --lstm-final-norm"),
        ((*LSTM, "--activation-fn", "relu"), "--activation-fn", "use --lstm-ffn and --lstm-glu"),
        (("--arch", RNN, "--decoder-ffn-embed-dim", "1024"), "--layer-agg rnn has no feed-forward", "--lstm-hidden"),
        ((*PLAIN, "--layer-agg", "lstm", "--encoder-ffn-embed-dim", "8"), "--encoder-ffn-embed-dim", "--lstm-hidden"),
        (
            (*PLAIN, "--decoder-layer-agg", "lstm", "--decoder-ffn-embed-dim", "8"),
            "--decoder-ffn-embed-dim",
            "--lstm-hidden",
        ),
        (
            ("--arch", "deep_transformer", "--layer-agg", "lstm", "--encoder-ffn-embed-dim", "8"),
            "--encoder-ffn-embed-dim",
            "--lstm-hidden",
        ),
        ((*LSTM, "--layer-agg", "lst"), "did you mean lstm?", "choose from "),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_the_command_line_refuses_what_means_nothing(line, problem, cure):
    with pytest.raises(UsageError) as error:
        parse(*line)
    assert problem in one_line(error)
    assert cure in one_line(error)


@pytest.mark.parametrize(
    "line, widths, pre_norm",
    [
        ((*LSTM, "--decoder-layer-agg", "residual", "--decoder-ffn-embed-dim", "96"), (0, 96), (False, True)),
        ((*LSTM, "--encoder-layer-agg", "dlcl", "--encoder-normalize-before"), (2048, 0), (True, False)),
        ((*PLAIN, "--encoder-layer-agg", "lstm", "--activation-fn", "relu"), (0, 2048), (False, True)),
        ((*PLAIN, "--decoder-layer-agg", "rnn", "--encoder-ffn-embed-dim", "96"), (96, 0), (True, False)),
        (("--arch", "deep_transformer", "--encoder-layer-agg", "lstm"), (0, 2048), (False, False)),
        (("--arch", "deep_transformer", "--decoder-layer-agg", "lstm"), (2048, 0), (False, False)),
        (LSTM, (0, 0), (False, False)),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_the_other_stack_keeps_its_feed_forward_layers(line, widths, pre_norm):
    args = parse(*line)
    assert (args.encoder_ffn_embed_dim, args.decoder_ffn_embed_dim) == widths
    assert (bool(args.encoder_normalize_before), bool(args.decoder_normalize_before)) == pre_norm
    assert args.activation_fn == ("gelu" if widths == (0, 0) else "relu")


@pytest.mark.parametrize(
    "line",
    [
        *((("--arch", name)) for name, row in ARCHITECTURES.items() if row.layer_agg in ("lstm", "rnn")),
        (*LSTM, "--decoder-layer-agg", "dlcl"),
        (*LSTM, "--encoder-layer-agg", "residual", "--lstm-merge", "two"),
        (*PLAIN, "--encoder-layer-agg", "lstm"),
        (*PLAIN, "--layer-agg", "rnn", "--lstm-hidden", "64"),
        ("--arch", "deep_transformer", "--layer-agg", "lstm"),
        ("--arch", "deep_transformer", "--decoder-layer-agg", "rnn"),
    ],
    ids=lambda line: " ".join(line[1:]),
)
def test_flags_of_a_checkpoint_are_taken_as_they_are(line):
    """fairseq applies the architecture again to the flags that a checkpoint holds."""
    args = parse(*line)
    before = dict(vars(args))
    ARCH_CONFIG_REGISTRY[args.arch](args)
    assert vars(args) == before


@pytest.mark.parametrize("kind", [DepthwiseLstm, DepthwiseRnn])
@pytest.mark.parametrize("share", ["none", "all"])
def test_what_one_stack_cannot_share_it_is_not_asked_to(kind, share):
    """RNNs have no gates that encoder and decoder could share, so that tie() is content with anything."""
    encoder, decoder = (make(kind, 2, 16, share=share, decoder=part) for part in (False, True))
    decoder.tie(encoder)
    shared = share == "all" and kind is DepthwiseLstm
    assert (decoder.gates is encoder.gates) is shared
    assert isinstance(decoder.gates, torch.nn.ModuleList)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("share", ["gate-encdec", "all"])
def test_sharing_between_the_stacks_needs_the_lstm_in_both(build, side, share):
    with pytest.raises(UsageError) as error:
        build("transformer_lstm_2l2l_tiny", lstm_share=share, **{f"{side}_layer_agg": "residual"})
    assert "use --lstm-share gate" in one_line(error)


@pytest.mark.parametrize("flags", [{"lstm_merge": "concat"}, *({"lstm_attn_residual": on} for on in (True, False))])
def test_decoder_options_need_the_lstm_in_the_decoder(build, flags):
    with pytest.raises(UsageError) as error:
        build("transformer_lstm_2l2l_tiny", decoder_layer_agg="residual", **flags)
    assert "has no effect on a decoder with --layer-agg residual" in one_line(error)


@pytest.mark.parametrize(
    "name, flags",
    [
        ("transformer_lstm_relative_12l_big", {"decoder_layer_agg": "residual"}),
        ("transformer_lstm_two_6l", {"decoder_layer_agg": "residual"}),
        ("transformer_lstm_1layer_6l", {"encoder_layer_agg": "rnn"}),
        ("transformer_lstm_1layer_6l", {"decoder_layer_agg": "dlcl"}),
    ],
)
def test_presets_that_need_both_stacks_give_way(build, batch, name, flags):
    """A row's preset is not the user's mistake where the user changes one of the stacks."""
    model = build(name, **flags, encoder_layers=2, decoder_layers=2)
    assert model(*batch)[0].isfinite().all()
