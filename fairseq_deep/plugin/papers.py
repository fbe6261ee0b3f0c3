"""The systems of the papers, with depths, options and scores as printed in their tables.

BLEU scores are tokenised, on En-De newstest2014 (Z19: 2,737 of its sentences). The papers print no vocabulary size for
En-De: the sizes here fit their parameter counts. W19, X24 and X20 share one vocabulary between both sides.

W19: Learning Deep Transformer Models for Machine Translation, Wang et al., 2019 (Tables 1, 2 and 6; 34,040 entries).
No vocabulary fits all counts of its Table 4 (Zh-En). With 113,280 entries of both sides together, the base and big
models have the printed 102.1M and 292.4M. DLCL of 25 and 30 layers then has 162.1M and 177.8M, where it prints 161.5M
and 177.2M; these two fit 112,100 entries.
X24: Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024 (Tables 1 to 6; 35,628 entries).
X20: Lipschitz Constrained Parameter Initialization for Deep Transformers, Xu et al., 2020 (Tables 3 and 4; counted with
X24's vocabulary). Its computation order v1 is "postnorm", with a norm on the embedding as in its authors' code; v2 is
pre-norm.
Z19: Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., 2019 (Tables 3 and
6; 55,022 entries of both sides together).
"""

# Tables 1 to 4 and 6 of W19: {method: {encoder depth: BLEU as printed, or None where only Zh-En is reported}}
W19 = {
    "prenorm": {6: "27.1", 16: "28.0", 20: "28.9", 25: None},
    "postnorm": {6: "27.5", 16: "failed", 20: "failed"},
    "dlcl": {6: "27.3", 16: "28.2", 20: "28.80", 25: None, 30: "29.3"},
    "dlcl_postnorm": {6: "27.6", 16: "28.4", 25: "29.2"},
}


# Tables 1 to 6 of X24, in the form of COMPARISON. Two scores belong to
# models of another size. lstm_6l (28.53) has 71.8M with the gate sets of the paper's text; the printed count, 70.25M,
# has one set ("gate-encdec"). lstm_two_6l (28.81) has 89.2M; no layout that we found has the printed 100.18M.
# The big model with a 1-layer hidden computation (288.41M) has separate gates in every layer ("none"). The paper
# shares them by default, but then this model has 187.64M, and with one set for both stacks 181.35M.
X24 = [
    ("lstm_3l3l", "-", "lstm", (3, 3), "base", "27.38", "X24", {}),
    ("lstm_6l", "-", "lstm", (6, 6), "base", "28.53", "X24", {}),
    ("lstm_12l12l", "-", "lstm", (12, 12), "base", "29.26", "X24", {}),
    ("lstm_18l18l", "-", "lstm", (18, 18), "base", "29.41", "X24", {}),
    ("lstm_24l24l", "-", "lstm", (24, 24), "base", "29.18", "X24", {}),
    ("lstm_1layer_6l", "-", "lstm", (6, 6), "base", "27.84", "X24", {"lstm_ffn": 1, "lstm_share": "gate-encdec"}),
    ("lstm_concat_6l", "-", "lstm", (6, 6), "base", "28.26", "X24", {"lstm_merge": "concat"}),
    ("lstm_two_6l", "-", "lstm", (6, 6), "base", "28.81", "X24", {"lstm_merge": "two"}),
    ("lstm_share_all_6l", "-", "lstm", (6, 6), "base", "26.94", "X24", {"lstm_share": "all"}),
    ("lstm_share_none_6l", "-", "lstm", (6, 6), "base", "28.25", "X24", {"lstm_share": "none"}),
    ("lstm_6l_big", "-", "lstm", (6, 6), "big", "29.58", "X24", {}),
    ("lstm_12l_big", "-", "lstm", (12, 6), "big", None, "-", {}),
    ("lstm_12l12l_big", "-", "lstm", (12, 12), "big", "30.69", "X24", {}),
    ("lstm_relative_12l_big", "-", "lstm", (12, 6), "big", "31.12", "X24", {"relative_positions": 16}),
    ("lstm_1layer_relative_12l_big", "-", "lstm", (12, 6), "big", "30.83", "X24",
     {"lstm_ffn": 1, "lstm_share": "none", "relative_positions": 16}),  # fmt: skip
    ("rnn_6l", "-", "rnn", (6, 6), "base", "23.24", "X24", {}),
    ("lstm_6l_iwslt", "-", "lstm", (6, 6), "iwslt", None, "-", {}),
    ("lstm_3l3l_small", "-", "lstm", (3, 3), "small", None, "-", {}),
    ("lstm_2l2l_tiny", "-", "lstm", (2, 2), "tiny", None, "-", {}),
]


# {(encoder depth, decoder depth): BLEU of v1 and v2 as printed}: Tables 3 and 4 of X20
X20 = {
    (6, 6): ("27.96", "27.38"),
    (12, 12): ("28.67", "28.13"),
    (18, 18): ("29.05", "28.67"),
    (24, 24): ("29.46", "29.20"),
    (24, 6): ("28.76", None),
    (6, 24): ("28.63", None),
}

# {depth of both stacks: (BLEU as printed, dropout, attention dropout)}: Table 3 of Z19. These rows also have activation
# dropout 0.1, which the paper does not mention: it is the default of its authors' code and reproduces the variances of
# Table 1.
Z19 = {
    6: ("27.50", 0.1, 0.1),
    12: ("28.27", 0.3, 0.2),
    18: (None, 0.3, 0.2),
    20: ("28.42", 0.3, 0.2),
    30: (None, 0.3, 0.2),
}

# (name after "transformer_", depth of both stacks, size, BLEU as printed, dropout, attention dropout): MAtt in Tables 3
# and 6 of Z19. 18 and 30 layers are in its Fig. 3, without numbers.
Z19_MATT = [
    ("matt_6l", 6, "base", "27.49", 0.1, 0.1),
    ("ds_matt_6l", 6, "base", "27.35", 0.1, 0.1),
    ("ds_matt_12l12l", 12, "base", "28.55", 0.3, 0.2),
    ("ds_matt_18l18l", 18, "base", None, 0.3, 0.2),
    ("ds_matt_20l20l", 20, "base", "28.67", 0.3, 0.2),
    ("ds_matt_30l30l", 30, "base", None, 0.3, 0.2),
    ("ds_matt_12l12l_big", 12, "big", "29.47", 0.3, 0.1),
    ("ds_matt_20l20l_big", 20, "big", "29.62", 0.3, 0.1),
    ("matt_6l_iwslt", 6, "iwslt", None, 0.3, 0.1),
    ("ds_matt_12l12l_iwslt", 12, "iwslt", None, 0.5, 0.3),
]

# Baselines of the papers and related systems:
# (name after "transformer_", norm, aggregator, depth, size, BLEU as printed, paper that prints it, further flags).
# Luna's 27.8 belongs to a model of 77.60M, which fits another vocabulary (docs/methods/luna.md).
# Scores are from X24, Table 6, and W19, Tables 1, 2 and 6 (the ablations "fix" of DLCL are the dense residual
# connections of Britz 2017 and Dou 2018). A row has no score if no paper here prints one, or only for another size.
_RK2 = {"ode_method": "rk2-learned", "ode_history": "dlcl", "relative_values": True}
# Our choice from the methods of 2018 to 2026 (docs/methods/modern.md); CTranslate2 runs it.
MODERN = {"deep_init": "xavier", "encoder_residual": "completep", "norm": "rms", "ffn": "swiglu",
          "rotary_positions": True}  # fmt: skip
COMPARISON = [
    ("transparent_16l", "post", "residual", (16, 6), "base", "28.39", "X24",
     {"decoder_memory": "transparent", "layernorm_embedding": True}),  # fmt: skip
    ("msc_18l18l", "post", "msc", (18, 18), "base", None, "-", {"decoder_memory": "msc"}),
    ("msc_18l18l_big", "post", "msc", (18, 18), "big", None, "-", {"decoder_memory": "msc"}),
    ("hierarchical_6l", "post", "hierarchical", (6, 6), "base", "28.63", "X24", {}),
    ("hierarchical_6l_big", "post", "hierarchical", (6, 6), "big", "29.21", "X24", {}),
    ("ode_24l", "pre", "ode", (24, 6), "base", "30.29", "X24", {"relative_positions": 8, **_RK2}),
    ("ode_12l_big", "pre", "ode", (12, 6), "big", "30.77", "X24", {"relative_positions": 16, **_RK2}),
    ("relative_6l", "post", "residual", (6, 6), "base", None, "-", {"relative_positions": 16, "relative_values": True}),
    ("relative_6l_big", "post", "residual", (6, 6), "big", "29.2", "W19",
     {"relative_positions": 8, "relative_values": True}),  # fmt: skip
    ("sdu_6l", "pre", "residual", (6, 6), "base", "28.22", "X24", {"residual": "sdu"}),
    ("b2t_18l18l", "post", "residual", (18, 18), "base", None, "-",
     {"residual": "b2t", "deep_init": "ds", "ds_init_alpha": 18**-0.5, "ds_init_exponent": 0.0}),  # fmt: skip
    ("dense_20l", "pre", "dlcl", (20, 6), "base", "28.51", "W19", {"dlcl_fixed": True}),
    ("dense_nonorm_20l", "pre", "dlcl", (20, 6), "base", "28.23", "W19", {"dlcl_fixed": True, "dlcl_no_norm": True}),
    ("dense_sum_20l", "pre", "dlcl", (20, 6), "base", "28.22", "W19", {"dlcl_fixed": True, "dlcl_init": "one"}),
    ("denseformer_20l", "pre", "dlcl", (20, 6), "base", None, "-", {"dlcl_init": "last", "dlcl_no_norm": True}),
    ("routing_6l_big", "post", "routing", (6, 6), "big", None, "-", {}),
    ("luna_6l", "post", "residual", (6, 6), "base", "27.8", "X24", {"encoder_attn": "luna", "decoder_attn": "luna"}),
    ("prenorm_12l1l", "pre", "residual", (12, 1), "base", None, "-", {}),
    ("postnorm_12l1l", "post", "residual", (12, 1), "base", None, "-", {}),
    ("prenorm_24l2l", "pre", "residual", (24, 2), "base", None, "-", {}),
    ("dlcl_12l1l", "pre", "dlcl", (12, 1), "base", None, "-", {}),
    *((f"modern_{name}", "pre", "residual", depth, "base", None, "-", MODERN)
      for name, depth in (("6l", (6, 6)), ("12l1l", (12, 1)), ("20l", (20, 6)))),
]
# authors of systems, where the registered methods do not name them
ORIGINS = {
    "dense": "Britz 2017",
    "denseformer": "Pagliardini 2024",
    "mhc": "Xie 2025",
    "modern": "fairseq_deep",
    "relative": "Shaw 2018",
    "prenorm_12l1l": "Kasai 2021",
    "postnorm_12l1l": "Kasai 2021",
}


def depth_name(encoder: int, decoder: int) -> str:
    """Return the part of a name that tells the depths."""
    return f"{encoder}l" if decoder == 6 else f"{encoder}l{decoder}l"


_DROPOUTS = {"attention_dropout": 0.1, "activation_dropout": 0.1}
LIPSCHITZ = [
    (f"lipschitz{order}_{depth_name(*depth)}", norm, "residual", depth, "base", bleu, "X20",
     {"deep_init": "lipschitz", **_DROPOUTS, **flags})
    for depth, scores in X20.items()
    for order, norm, bleu, flags in (
        ("_postnorm", "post", scores[0], {"layernorm_embedding": True}), ("", "pre", scores[1], {}))
]  # fmt: skip
DEPTH_SCALED = [
    (f"ds_{depth_name(depth, depth)}", "post", "residual", (depth, depth), "base", bleu, "Z19",
     {"deep_init": "ds", "dropout": dropout, "attention_dropout": attention_dropout, "activation_dropout": 0.1})
    for depth, (bleu, dropout, attention_dropout) in Z19.items()
] + [
    (name, "post", "residual", (depth, depth), size, bleu, "-" if size == "iwslt" else "Z19",
     {"dropout": dropout, "attention_dropout": attention_dropout, "activation_dropout": 0.1, "decoder_attn": "merged",
      "deep_init": "ds" if name.startswith("ds_") else "xavier"})
    for name, depth, size, bleu, dropout, attention_dropout in Z19_MATT
]  # fmt: skip
CONNECTED = [
    (f"{init}_{depth_name(*depth)}", "post", "residual", depth, "base", None, "-", {"deep_init": init, **_DROPOUTS})
    for init in ("deepnet", "admin")
    for depth in ((18, 18), (24, 24), (30, 30), (60, 12))
]
"""Initialisations with residual connections of their own."""
