"""Named architectures: exact parameter counts, flags that override presets, gradients at full depth.

The presets of every row are in ``tests/snapshots/archs.txt``.
"""

import argparse

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.plugin.architectures import ARCHITECTURES, count_parameters, list_archs, stored_count
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.flags import parse
from tests.helpers.invariances import every_parameter_gets_a_finite_gradient
from tests.helpers.methods import structure
from tests.helpers.models import task_of

DEEPEST_LAST = sorted(ARCHITECTURES.values(), key=lambda row: row.encoder_layers + row.decoder_layers)
STRUCTURES = [*{structure(row): row.name for row in DEEPEST_LAST}.values()]
of_each_structure = pytest.mark.parametrize("name", STRUCTURES)

# exact counts at the papers' vocabularies (34,040; 35,628 where the score is of X24): counts of the papers and formulas
# of the method pages
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
    "transformer_postnorm_6l_big": 211214336,
    "transformer_prenorm_6l_big": 211218432,
    "transformer_dlcl_12l_big": 286832858,
    # merged attention: the paper's code has an embedding bias of d numbers, which fairseq does not have
    "transformer_matt_6l": 66000384 - 512,
    "transformer_ds_matt_6l": 66000384 - 512,
    "transformer_ds_matt_12l12l": 103828992 - 512,
    "transformer_ds_matt_18l18l": 141657600 - 512,
    "transformer_ds_matt_20l20l": 154267136 - 512,
    "transformer_ds_matt_30l30l": 217314816 - 512,
    "transformer_ds_matt_12l12l_big": 358652928 - 1024,
    "transformer_ds_matt_20l20l_big": 560192512 - 1024,
    "transformer_lipschitz_postnorm_18l18l": 150659072,
    "transformer_ds_20l20l": 175299584,
    # 12 pairs of an encoder and a decoder layer more than 6 + 6
    "transformer_deepnet_18l18l": 61566976 + 12 * 7356416,
    "transformer_admin_18l18l": 61566976 + 12 * 7356416 + 18 * 5 * 512,
}


def count_by_layers(row):
    """The count of a plain or DLCL model of base size, from 6 + 6 layers and one more of each; None for others."""
    if row.size != "base" or row.encoder_size or row.options or row.layer_agg not in ("residual", "dlcl"):
        return None
    encoder, decoder = row.encoder_layers, row.decoder_layers
    plain = 61569024 + (encoder - 6) * 3152384 + (decoder - 6) * 4204032
    final_norms = 2 * 1024 if row.norm == "post" else 0
    dlcl = (encoder + 1) ** 2 + (decoder + 1) ** 2 + (encoder + decoder) * 1024
    return plain - final_norms + (dlcl if row.layer_agg == "dlcl" else 0)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in PARAMETERS or name in STRUCTURES else [pytest.mark.nightly])
    for name in list_archs()
])  # fmt: skip
def test_parameter_count_is_the_papers(name):
    """Also the count of the table, which python -m tests.helpers.renew writes."""
    expected = PARAMETERS.get(name) or count_by_layers(ARCHITECTURES[name]) or stored_count(name)
    assert count_parameters(name) == stored_count(name) == expected


@of_each_structure
def test_every_parameter_of_the_deepest_model_of_a_structure_gets_a_finite_gradient(name, build, dictionary):
    every_parameter_gets_a_finite_gradient(lambda: build(name), dictionary)


@pytest.mark.parametrize("flags, check", [
    ("--dlcl-init one", lambda h: h.weight[2].tolist()[:4] == [1, 1, 1, 0]),
    ("--dlcl-fixed", lambda h: not h.weight.requires_grad and "weight" in dict(h.named_buffers())),
    ("--dlcl-weight-type scalar_4", lambda h: h.groups == 4),
    ("--dlcl-normalize", lambda h: h.normalize),
    ("--dlcl-dropout 0.3", lambda h: h.dropout.p == 0.3),
    ("--dlcl-window 2", lambda h: h.window == 2),
    ("--dlcl-no-norm", lambda h: not len(h.layer_norms)),
    ("", lambda h: not (h.normalize or h.dropout.p or h.window == 2) and h.groups == 1 and h.weight.requires_grad),
])  # fmt: skip
def test_dlcl_flags_reach_both_stacks(flags, check, dictionary):
    args = parse("--arch", "transformer_dlcl_6l", "--encoder-embed-dim", "16", *flags.split())
    model = DeepTransformerModel.build_model(args, task_of(dictionary))
    assert check(model.encoder.aggregator) and check(model.decoder.aggregator)


@of_each_structure
def test_a_flag_overrides_a_preset(name):
    chosen = {
        "encoder_layers": 3, "decoder_layers": 5, "encoder_embed_dim": 48, "decoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 72, "decoder_ffn_embed_dim": 56,  # the other aggregator has feed-forward sub-layers
        "encoder_attention_heads": 6, "decoder_attention_heads": 2,
        "dropout": 0.25, "attention_dropout": 0.35, "activation_dropout": 0.45,
        "layer_agg": "residual" if ARCHITECTURES[name].layer_agg != "residual" else "dlcl",
    }  # fmt: skip
    sides = {"encoder_normalize_before", "decoder_normalize_before"}  # fairseq has no flag that says no
    assert {*ARCHITECTURES[name].presets()} - sides == {*chosen}
    words = [word for flag, value in chosen.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    args = parse("--arch", name, "--encoder-normalize-before", "--decoder-normalize-before", *words)
    assert {flag: getattr(args, flag) for flag in {*chosen, *sides}} == {**chosen, **dict.fromkeys(sides, True)}


def test_flags_that_speak_for_another():
    """As in fairseq: a width of the encoder holds for the decoder, --relu-dropout is the old --activation-dropout."""
    args = parse("--arch", "transformer_dlcl_30l", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96",
                 "--relu-dropout", "0.3")  # fmt: skip
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.activation_dropout) == (64, 96, 0.3)


class Recorded(argparse.Namespace):
    """Flags, with the number of assignments to them."""

    writes = 0

    def __setattr__(self, name, value):
        type(self).writes += 1
        super().__setattr__(name, value)


@pytest.mark.parametrize("name", ["transformer_dlcl_12l", "deep_transformer", "dlcl_transformer"])
def test_an_architecture_fills_a_namespace_once(name):
    """fairseq calls it when it parses a command, and again when it builds the model."""
    args = Recorded()
    ARCH_CONFIG_REGISTRY[name](args)
    before = Recorded.writes
    ARCH_CONFIG_REGISTRY[name](args)
    assert args.encoder_layers and Recorded.writes == before > 0
