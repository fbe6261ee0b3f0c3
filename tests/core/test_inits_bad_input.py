"""Flags that mean nothing for, or contradict, an initialisation end with one line: the flag, and what to do instead."""

import pytest

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from tests.helpers.flags import one_line, parse
from tests.helpers.inits import FITTING, METHODS, STACKS

POST, PRE, DLCL = "transformer_postnorm_6l", "transformer_prenorm_6l", "transformer_dlcl_postnorm_6l"
LSTM = "transformer_lstm_6l"


def without(*methods, **flags):
    """Refusals of options whose method is not used."""
    flag, value = flags.popitem()
    name = flag.replace("_", "-")
    for method in methods:
        chosen = {} if method is None else {"deep_init": method}
        yield POST, {**chosen, flag: value}, f"--{name} has no effect without --deep-init", "or omit it"


@pytest.mark.parametrize(
    "name, flags, problem, cure",
    [
        # values
        (POST, {"deep_init": "ds", "ds_init_alpha": 2.0}, "--ds-init-alpha 2.0 is out of range", "up to 1"),
        (POST, {"deep_init": "ds", "ds_init_alpha": 0.0}, "--ds-init-alpha 0.0 is out of range", "above 0"),
        (POST, {"deep_init": "ds", "ds_init_alpha": -0.5}, "--ds-init-alpha -0.5 is out of range", "above 0"),
        (POST, {"deep_init": "ds", "ds_init_alpha": float("nan")}, "--ds-init-alpha must be a number", "nan"),
        (POST, {"deep_init": "ds", "ds_init_exponent": -0.25}, "--ds-init-exponent -0.25", "use 0.25 or 0.5"),
        (POST, {"deep_init": "ds", "ds_init_exponent": float("nan")}, "--ds-init-exponent must be a number", "nan"),
        (POST, {"deep_init": "ds", "ds_init_exponent": float("inf")}, "--ds-init-exponent must be a number", "inf"),
        (
            POST,
            {"deep_init": "lipschitz", "lipschitz_embeddings": "fairseq"},
            "--lipschitz-embeddings fairseq is unknown",
            "use one of lipschitz, normal",
        ),
        (POST, {"deep_init": "admin", "admin_start": "log"}, "--admin-start log is unknown", "logn, 1, n, profile"),
        (
            POST,
            {"deep_init": "depth-scaled", "depth_scaled_kind": "bert"},
            "--depth-scaled-kind bert is unknown",
            "use marian or gpt2",
        ),
        (POST, {"decoder_deep_init": "ds", "ds_init_alpha": 2.0}, "--ds-init-alpha 2.0 is out of range", "up to 1"),
        # names
        (POST, {"deep_init": "lipshitz"}, "unknown --deep-init lipshitz", "did you mean lipschitz?"),
        (POST, {"encoder_deep_init": "depnet"}, "unknown --deep-init depnet", "did you mean deepnet?"),
        (POST, {"decoder_deep_init": "t-fixup"}, "unknown --deep-init t-fixup", "did you mean tfixup?"),
        # options without their method
        *without(None, "xavier", "lipschitz", "depth-scaled", ds_init_alpha=0.5),
        *without(None, "deepnet", ds_init_exponent=0.5),
        *without(None, "xavier", lipschitz_embeddings="normal"),
        *without(None, "xavier", "deepnet", admin_start="profile"),
        *without(None, "ds", depth_scaled_kind="gpt2"),
        # norm placement
        *(
            (name, {"deep_init": method}, f"--deep-init {method} requires post-norm", "use a transformer_postnorm")
            for method in ("deepnet", "admin")
            for name in (PRE, "transformer_dlcl_6l")
        ),
        (POST, {"deep_init": "deepnet", "decoder_normalize_before": True}, "post-norm (decoder)", "transformer_postn"),
        (PRE, {"encoder_deep_init": "admin"}, "post-norm (encoder)", "transformer_postnorm"),
        *(
            (PRE, {"deep_init": method}, f"--deep-init {method} requires stacks", "use a transformer_postnorm")
            for method in ("tfixup", "rezero")
        ),
        *(
            (name, {"deep_init": method}, f"--deep-init {method} requires stacks", "--encoder-layer-agg residual")
            for method in ("tfixup", "rezero")
            for name in (DLCL, "transformer_dlcl_6l")
        ),
        (POST, {"deep_init": "rezero", "decoder_layer_agg": "dlcl"}, "without norms", "--decoder-layer-agg residual"),
        # stacks without residual connections
        *(
            (name, {"deep_init": method}, f"--deep-init {method} requires residual connections", "xavier or lipschitz")
            for method in ("ds", "depth-scaled", "deepnet", "admin", "tfixup", "rezero")
            for name in (LSTM, "transformer_rnn_6l")
        ),
        (LSTM, {"encoder_deep_init": "ds"}, "which --layer-agg lstm replaces (encoder)", "use xavier or lipschitz"),
        (LSTM, {"deep_init": "ds", "encoder_layer_agg": "residual"}, "lstm replaces (decoder)", "xavier or"),
        # sub-layers and norms that a method counts on, or does without
        *(
            (POST, {"deep_init": method, "layernorm_embedding": True}, "--layernorm-embedding adds a norm", "omit it")
            for method in ("tfixup", "rezero")
        ),
        *(
            (POST, {"deep_init": method, "no_cross_attention": True}, f"--deep-init {method} requires three", "use ds")
            for method in ("deepnet", "tfixup")
        ),
        # other layers, and depths that are not those of the training
        *(
            (POST, {"deep_init": "deepnet", f"{side}_layers_to_keep": "0,1"}, f"--{side}-layers-to-keep", "omit")
            for side in ("encoder", "decoder")
        ),
        # a first batch that not every layer sees
        *(
            (POST, {"deep_init": "admin", "admin_start": "profile", f"{side}_layerdrop": 0.2}, "--admin-start", side)
            for side in ("encoder", "decoder")
        ),
    ],
)
def test_flags_that_clash(build, name, flags, problem, cure):
    with pytest.raises(UsageError) as error:
        build(name, **flags)
    assert problem in one_line(error)
    assert cure in one_line(error)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STACKS)
def test_every_pair_of_method_and_stack_is_built_or_refused(method, name, build):
    if name in FITTING[method]:
        build(name, deep_init=method, **STACKS[name])
    else:
        with pytest.raises(UsageError) as error:
            build(name, deep_init=method, **STACKS[name])
        assert f"--deep-init {method}" in one_line(error)
        assert "use " in one_line(error)


@pytest.mark.parametrize("flag", ["--deep-init", "--encoder-deep-init", "--decoder-deep-init"])
def test_the_command_line_names_the_nearest_method(flag):
    with pytest.raises(UsageError) as error:
        parse("--arch", POST, flag, "lipshitz")
    assert "did you mean lipschitz?" in one_line(error)
    assert "choose from admin, deepnet, depth-scaled, ds, fairseq" in one_line(error)


@pytest.mark.parametrize(
    "line, problem",
    [
        (("--arch", LSTM, "--deep-init", "ds"), "--deep-init ds requires residual connections"),
        (("--arch", PRE, "--deep-init", "deepnet"), "--deep-init deepnet requires post-norm"),
        (("--arch", DLCL, "--deep-init", "rezero"), "--deep-init rezero requires stacks"),
        (("--arch", POST, "--deep-init", "ds", "--ds-init-alpha", "2"), "--ds-init-alpha 2.0 is out of range"),
        (("--arch", POST, "--ds-init-exponent", "0.5"), "--ds-init-exponent has no effect without --deep-init ds"),
        (("--arch", POST, "--deep-init", "admin", "--admin-start", "x"), "--admin-start x is unknown"),
        (("--arch", "transformer_deepnet_18l18l", "--encoder-normalize-before"), "--deep-init deepnet requires"),
        (("--arch", "transformer_ds_12l12l", "--deep-init", "xavier", "--ds-init-alpha", "0.5"), "has no effect"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_the_model_of_a_command_line_is_refused(line, problem, dictionary):
    """From the parsed flags of fairseq-train to the model, as fairseq goes."""
    args = parse(*line, "--encoder-embed-dim", "16")
    flags = {name: value for name, value in vars(args).items() if value is not None and name != "arch"}
    with pytest.raises(UsageError) as error:
        build_architecture(args.arch, dictionary, **flags)
    assert problem in one_line(error)


@pytest.mark.parametrize(
    "name, flags",
    [
        (POST, {"deep_init": "ds", "ds_init_alpha": 1.0, "ds_init_exponent": 0.0}),
        (POST, {"encoder_deep_init": "ds", "ds_init_alpha": 0.5}),
        (POST, {"encoder_deep_init": "rezero", "decoder_deep_init": "deepnet"}),
        (POST, {"deep_init": "rezero", "decoder_deep_init": "xavier", "decoder_layer_agg": "dlcl"}),
        (LSTM, {"deep_init": "ds", "layer_agg": "residual", "encoder_ffn_embed_dim": 32}),
        (LSTM, {"deep_init": "lipschitz", "encoder_layer_agg": "residual", "encoder_deep_init": "ds"}),
        (POST, {"deep_init": "ds", "encoder_layerdrop": 0.2}),
        (POST, {"deep_init": "admin", "encoder_layerdrop": 0.2}),
    ],
)
def test_what_goes_together_is_built(build, name, flags):
    build(name, **flags)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_stack_without_layers_is_built_or_refused(method, side, build):
    """fairseq builds it; some constants have its depth in the denominator."""
    try:
        model = build(POST, deep_init=method, **{f"{side}_layers": 0})
    except UsageError as error:
        assert f"--{side}-layers 0" in str(error) and "\n" not in str(error)
    else:
        assert len(getattr(model, side).layers) == 0
