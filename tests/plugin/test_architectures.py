"""Named architectures: exact counts, the papers' presets, which flags override, gradients at full depth."""

import pytest

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.plugin.architectures import ARCHITECTURES, count_parameters, list_archs, stored_count
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.flags import parse
from tests.helpers.invariances import every_parameter_gets_a_finite_gradient
from tests.helpers.methods import structure
from tests.helpers.models import full_size, size_of, task_of

DEEPEST_LAST = sorted(ARCHITECTURES.values(), key=lambda row: row.encoder_layers + row.decoder_layers)
of_each_structure = pytest.mark.parametrize("name", {structure(row): row.name for row in DEEPEST_LAST}.values())

# exact counts at the papers' vocabularies (34,040; 35,628 where the score is of X24): rows of the table of counts, and
# for systems that no paper counts, the formulas of their pages
PARAMETERS = {
    "transformer_transparent_16l": 93906022,
    "transformer_sdu_6l": 78141440,
    "transformer_hierarchical_6l": 85470208,
    "transformer_hierarchical_6l_big": 305158144,
    "transformer_iterative_6l": 93060096,
    "transformer_linear_6l": 64712704,
    "transformer_ode_6l": 61582435,
    "transformer_ode_rk4_6l": 61569024,
    "transformer_ode_24l": 119217315,
    "transformer_ode_12l_big": 288525531,
    "transformer_layerwise_6l": 61566976,
    "transformer_b2t_18l18l": 149843968,
    "transformer_peri_18l18l": 149938176,
    "transformer_branchnorm_18l18l": 149843968,
    "transformer_completep_18l18l": 149846016,
    "transformer_prores_18l18l": 149846016,
    "transformer_mix_ln_18l18l": 149846016,
    "transformer_layernorm_scaling_18l18l": 149846016,
    "transformer_dense_20l": 105702400 + 20 * 1024 + 6 * 1024,
    "transformer_denseformer_20l": 105702400 + 21 * 21 + 7 * 7,
    "transformer_residual_dual_6l": 61569024,
    "transformer_attention_residual_6l": 61599744,
    "transformer_attention_residual_block_24l24l": 194107392,
    "transformer_hyper_connections_6l": 61569024 + 30 * (24 + 8 * 512 + 2),
    "transformer_mhc_6l": 61569024 + 30 * (24 * (4 * 512 + 1) + 3),
    "transformer_ssru_6l": 61569024 - 6 * (2 * 512**2 + 3 * 512),
    "transformer_ssru_12l1l": 80483328 - 5 * 4204032 - (2 * 512**2 + 3 * 512),
    "transformer_luna_6l": 75006976,
    "transformer_luna_encoder_6l": 66308096,
    "transformer_gtrans_6l": 61569024 + 2,
    "transformer_mudd_6l": 61569024 + 2 * sum(size * (512 + size + 1) for size in range(2, 8)),
    "transformer_mudd_20l": 105702400 + sum(size * (512 + size + 1) for size in [*range(2, 22), *range(2, 8)]),
    # RMSNorm has d less per norm, a SwiGLU layer 1,536 more
    "transformer_modern_6l": 61569024 - 512 * (6 * 2 + 6 * 3 + 2) + 12 * 1536,
    "transformer_modern_12l1l": 80483328 - 5 * 4204032 - 512 * (12 * 2 + 3 + 2) + 13 * 1536,
    "transformer_modern_20l": 105702400 - 512 * (20 * 2 + 6 * 3 + 2) + 26 * 1536,
    "transformer_prenorm_12l1l": 80483328 - 5 * 4204032,
    "transformer_postnorm_6l": 61566976,
    "transformer_prenorm_6l": 61569024,
    "transformer_postnorm_6l_big": 211214336,
    "transformer_prenorm_6l_big": 211218432,
    "transformer_postnorm_20l": 105700352,
    "transformer_prenorm_12l": 80483328,
    "transformer_prenorm_16l": 93092864,
    "transformer_prenorm_18l": 99397632,
    "transformer_prenorm_20l": 105702400,
    "transformer_prenorm_24l": 118311936,
    "transformer_prenorm_25l": 121464320,
    "transformer_prenorm_30l": 137226240,
    "transformer_prenorm_35l": 152988160,
    "transformer_prenorm_40l": 168750080,
    "transformer_prenorm_48l": 193969152,
    "transformer_prenorm_60l": 231797760,
    "transformer_dlcl_postnorm_6l": 61579362,
    "transformer_dlcl_postnorm_16l": 93113682,
    "transformer_dlcl_postnorm_25l": 121494741,
    "transformer_dlcl_6l": 61581410,
    "transformer_dlcl_12l": 80501978,
    "transformer_dlcl_16l": 93115730,
    "transformer_dlcl_18l": 99422618,
    "transformer_dlcl_20l": 105729514,
    "transformer_dlcl_24l": 118343330,
    "transformer_dlcl_25l": 121496789,
    "transformer_dlcl_30l": 137264114,
    "transformer_dlcl_35l": 153031489,
    "transformer_dlcl_40l": 168798914,
    "transformer_dlcl_48l": 194026898,
    "transformer_dlcl_60l": 231869114,
    "transformer_dlcl_12l_big": 286832858,
}


@pytest.mark.parametrize("name", list_archs())
def test_parameter_count_is_the_papers(name):
    """And that of the table, which python -m tests.helpers.counts writes."""
    assert count_parameters(name) == stored_count(name) == PARAMETERS.get(name, stored_count(name))


def test_postnorm_models_have_one_final_norm_less():
    rows = [row for row in ARCHITECTURES.values() if "_postnorm" in row.name and row.size == "base"]
    twins = [row.name for row in rows if not row.options]
    assert len(twins) > 15
    for name in twins:
        plain = ARCHITECTURES[name].layer_agg == "residual"
        twin = name.replace("_postnorm", "_prenorm" if plain else "")
        assert count_parameters(twin) - count_parameters(name) == 2 * 2 * 512


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"decoder_layer_agg": "residual"}, 137257921),
        ({"encoder_layers": 20, "dlcl_no_norm": True}, 105702890),
        ({"dlcl_weight_type": "vector"}, 137780224),
        ({"dlcl_fixed": True}, 137264114 - 31 * 31 - 7 * 7),
    ],
    ids=["encoder only", "no history norm", "vector weights", "fixed weights"],
)
def test_parameter_count_of_the_ablations(flags, expected):
    assert size_of(full_size("transformer_dlcl_30l", 34040, share_all_embeddings=True, **flags)) == expected


@of_each_structure
def test_every_parameter_of_the_deepest_model_of_a_structure_gets_a_finite_gradient(name, build, dictionary):
    every_parameter_gets_a_finite_gradient(lambda: build(name), dictionary)


# what the papers' presets are: (dropout, attention dropout, activation dropout), widths and heads, depth, norm
LITERAL_PRESETS = {
    "transformer_postnorm_6l": ((0.1, 0.0, 0.0), (512, 2048, 8), (6, 6), False, "residual", "27.5"),
    "transformer_postnorm_20l": ((0.1, 0.0, 0.0), (512, 2048, 8), (20, 6), False, "residual", "failed"),
    "transformer_prenorm_6l": ((0.1, 0.1, 0.1), (512, 2048, 8), (6, 6), True, "residual", "27.1"),
    "transformer_prenorm_20l": ((0.1, 0.1, 0.1), (512, 2048, 8), (20, 6), True, "residual", "28.9"),
    "transformer_postnorm_6l_big": ((0.3, 0.0, 0.0), (1024, 4096, 16), (6, 6), False, "residual", "28.8"),
    "transformer_prenorm_6l_big": ((0.3, 0.1, 0.1), (1024, 4096, 16), (6, 6), True, "residual", "28.7"),
    "transformer_dlcl_postnorm_6l": ((0.1, 0.0, 0.0), (512, 2048, 8), (6, 6), False, "dlcl", "27.6"),
    "transformer_dlcl_postnorm_25l": ((0.1, 0.0, 0.0), (512, 2048, 8), (25, 6), False, "dlcl", "29.2"),
    "transformer_dlcl_6l": ((0.1, 0.1, 0.1), (512, 2048, 8), (6, 6), True, "dlcl", "27.3"),
    "transformer_dlcl_30l": ((0.1, 0.1, 0.1), (512, 2048, 8), (30, 6), True, "dlcl", "29.3"),
    "transformer_dlcl_12l_big": ((0.3, 0.1, 0.1), (1024, 4096, 16), (12, 6), True, "dlcl", "29.17"),
    "transformer_dlcl_3l3l_small": ((0.1, 0.1, 0.1), (256, 512, 4), (3, 3), True, "dlcl", None),
}


@pytest.mark.parametrize("name", LITERAL_PRESETS)
def test_presets_are_the_published_ones(name):
    dropouts, size, depth, pre_norm, layer_agg, bleu = LITERAL_PRESETS[name]
    args = parse("--arch", name)
    assert (args.dropout, args.attention_dropout, args.activation_dropout) == dropouts
    for side in ("encoder", "decoder"):
        got = [getattr(args, f"{side}_{flag}") for flag in ("embed_dim", "ffn_embed_dim", "attention_heads")]
        assert tuple(got) == size
        assert getattr(args, f"{side}_normalize_before") is pre_norm
    assert (args.encoder_layers, args.decoder_layers) == depth
    assert args.layer_agg == layer_agg
    assert args.activation_fn == "relu"
    assert ARCHITECTURES[name].bleu == bleu


def test_the_big_encoder_is_on_one_side_only():
    args = parse("--arch", "transformer_prenorm_6l_big_encoder")
    assert (args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.encoder_attention_heads) == (1024, 4096, 16)
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads) == (512, 2048, 8)


@pytest.mark.parametrize(
    "flags, check",
    [
        (["--dlcl-init", "one"], lambda h: h.weight[2].tolist()[:4] == [1, 1, 1, 0]),
        (["--dlcl-fixed"], lambda h: not h.weight.requires_grad and "weight" in dict(h.named_buffers())),
        (["--dlcl-weight-type", "scalar_4"], lambda h: h.groups == 4),
        (["--dlcl-normalize"], lambda h: h.normalize),
        (["--dlcl-dropout", "0.3"], lambda h: h.dropout.p == 0.3),
        (["--dlcl-window", "2"], lambda h: h.window == 2),
        (["--dlcl-no-norm"], lambda h: not len(h.layer_norms)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_dlcl_flags_reach_both_stacks(flags, check, dictionary):
    args = parse("--arch", "transformer_dlcl_6l", "--encoder-embed-dim", "16", *flags)
    plain = parse("--arch", "transformer_dlcl_6l", "--encoder-embed-dim", "16")
    task = task_of(dictionary)
    for parsed, expected in ((args, True), (plain, False)):
        model = DeepTransformerModel.build_model(parsed, task)
        for stack in (model.encoder, model.decoder):
            assert bool(check(stack.aggregator)) is expected


@of_each_structure
def test_a_flag_beats_its_preset(name):
    chosen = {
        "encoder_layers": 3,
        "decoder_layers": 5,
        "encoder_embed_dim": 48,
        "decoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 72,  # the other aggregator has feed-forward sub-layers
        "decoder_ffn_embed_dim": 56,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 2,
        "dropout": 0.25,
        "attention_dropout": 0.35,
        "activation_dropout": 0.45,
        "layer_agg": "residual" if ARCHITECTURES[name].layer_agg != "residual" else "dlcl",
    }
    presets = ARCHITECTURES[name].presets()
    unset = {"encoder_normalize_before", "decoder_normalize_before"}  # fairseq has no flag that says no
    assert set(presets) - unset == set(chosen)
    line = ["--arch", name, "--encoder-normalize-before", "--decoder-normalize-before"]
    for flag, value in chosen.items():
        line += [f"--{flag.replace('_', '-')}", str(value)]
    args = parse(*line)
    assert {flag: getattr(args, flag) for flag in chosen} == chosen
    assert args.encoder_normalize_before and args.decoder_normalize_before
    plain = parse("--arch", name)
    for flag, (value, _) in AGGREGATORS.get(ARCHITECTURES[name].layer_agg).unused_flags.items():
        presets.update({flag.format(side=side): value for side in ("encoder", "decoder")})
    presets.update(ARCHITECTURES[name].options)
    assert {flag: getattr(plain, flag) for flag in presets} == presets


def test_flags_that_speak_for_another():
    """As in fairseq: a width of the encoder holds for the decoder, --relu-dropout is the old --activation-dropout."""
    args = parse("--arch", "transformer_dlcl_30l", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96",
                 "--relu-dropout", "0.3")  # fmt: skip
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.activation_dropout) == (64, 96, 0.3)
