"""The systems of the papers, as their tables print them: depths, options, scores.

BLEU scores are tokenised, En-De newstest2014; vocabularies are shared by both sides.

W19: Learning Deep Transformer Models for Machine Translation, Wang et al., 2019 (Tables 1, 2 and 6; 34,040 entries).
X24: Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024 (Tables 2 to 6; 35,628 entries).
X20: Lipschitz Constrained Parameter Initialization for Deep Transformers, Xu et al., 2020 (Tables 3 and 4; counted with
X24's vocabulary). Its computation order v1 is "postnorm", with a norm on the embedding; v2 is pre-norm.
Z19: Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., 2019 (Table 3;
55,022 entries of both sides together).
"""

# Tables 1 to 4 and 6 of W19: {method: {encoder depth: BLEU as printed, or None where only Zh-En is reported}}
W19 = {
    "prenorm": {6: "27.1", 16: "28.0", 20: "28.9", 25: None},
    "postnorm": {6: "27.5", 16: "failed", 20: "failed"},
    "dlcl": {6: "27.3", 16: "28.2", 20: "28.80", 25: None, 30: "29.3"},
    "dlcl_postnorm": {6: "27.6", 16: "28.4", 25: "29.2"},
}


# (name after "transformer_", depth, size, BLEU as printed, further flags): Tables 2 to 6 of X24
X24 = [
    ("lstm_3l3l", (3, 3), "base", "27.38", {}),
    ("lstm_6l", (6, 6), "base", "28.53", {}),
    ("lstm_12l12l", (12, 12), "base", "29.26", {}),
    ("lstm_18l18l", (18, 18), "base", "29.41", {}),
    ("lstm_24l24l", (24, 24), "base", "29.18", {}),
    ("lstm_1layer_6l", (6, 6), "base", "27.84", {"lstm_ffn": 1, "lstm_share": "gate-encdec"}),
    ("lstm_concat_6l", (6, 6), "base", "28.26", {"lstm_merge": "concat"}),
    ("lstm_two_6l", (6, 6), "base", "28.81", {"lstm_merge": "two"}),
    ("lstm_share_all_6l", (6, 6), "base", "26.94", {"lstm_share": "all"}),
    ("lstm_share_none_6l", (6, 6), "base", "28.25", {"lstm_share": "none"}),
    ("lstm_6l_big", (6, 6), "big", "29.58", {}),
    ("lstm_12l_big", (12, 6), "big", None, {}),
    ("lstm_12l12l_big", (12, 12), "big", "30.69", {}),
    ("lstm_relative_12l_big", (12, 6), "big", "31.12", {"relative_positions": 16}),
    (
        "lstm_1layer_relative_12l_big",
        (12, 6),
        "big",
        "30.83",
        {"lstm_ffn": 1, "lstm_share": "none", "relative_positions": 16},
    ),
    ("rnn_6l", (6, 6), "base", "23.24", {}),
    ("lstm_6l_iwslt", (6, 6), "iwslt", None, {}),
    ("lstm_3l3l_small", (3, 3), "small", None, {}),
    ("lstm_2l2l_tiny", (2, 2), "tiny", None, {}),
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

# {depth of both stacks: (BLEU as printed, dropout, attention dropout)}: Table 3 of Z19
Z19 = {
    6: ("27.50", 0.1, 0.1),
    12: ("28.27", 0.3, 0.2),
    18: (None, 0.3, 0.2),
    20: ("28.42", 0.3, 0.2),
    30: (None, 0.3, 0.2),
}

# (name after "transformer_", depth of both stacks, size, BLEU as printed, dropout, attention dropout): MAtt in Tables 3
# and 6 of Z19; 30 layers: the authors' public notes
Z19_MATT = [
    ("matt_6l", 6, "base", "27.49", 0.1, 0.1),
    ("ds_matt_6l", 6, "base", "27.35", 0.1, 0.1),
    ("ds_matt_12l12l", 12, "base", "28.55", 0.3, 0.2),
    ("ds_matt_18l18l", 18, "base", None, 0.3, 0.2),
    ("ds_matt_20l20l", 20, "base", "28.67", 0.3, 0.2),
    ("ds_matt_30l30l", 30, "base", "28.86", 0.3, 0.2),
    ("ds_matt_12l12l_big", 12, "big", "29.47", 0.3, 0.1),
    ("ds_matt_20l20l_big", 20, "big", "29.62", 0.3, 0.1),
    ("matt_6l_iwslt", 6, "iwslt", None, 0.3, 0.1),
    ("ds_matt_12l12l_iwslt", 12, "iwslt", None, 0.5, 0.3),
]
