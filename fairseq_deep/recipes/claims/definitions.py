"""Definitions of the papers' claims; ``scales`` has their training settings.

A claim has a list of systems (in the syntax of ``examples/compare``, with the score in the paper) and a list of
statements about them. Claims of one group share training conditions, a directory and training runs.
"""

from dataclasses import dataclass

PAPERS = {
    "W19": "Wang et al., 2019, Learning Deep Transformer Models for Machine Translation",
    "X20": "Xu et al., 2020, Lipschitz Constrained Parameter Initialization for Deep Transformers",
    "Z19": "Zhang et al., 2019, Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention",
    "X24": "Xu et al., 2024, Rewiring the Transformer with Depth-Wise LSTMs",
}


@dataclass(frozen=True)
class System:
    """A system of a claim.

    Attributes:
        label: name in the table and of its directory
        words: architecture and flags; ``{hidden}`` is replaced by three times the width
        paper: BLEU in the paper, or the paper's remark
        depth: depth coordinate in the claim's picture
        line: name of its line in that picture
    """

    label: str
    words: str
    paper: str = "-"
    depth: int | None = None
    line: str = ""


@dataclass(frozen=True)
class Statement:
    """A statement of a paper about its systems, in a testable form.

    Attributes:
        kind: "higher" (*left* is better than *right* in BLEU, or in valid loss without translations), "trains" (*left*
            learns to use its source), "fails" (*left* does not), "faster" (*left* decodes faster than *right*), "as
            good" (*left* is at most ``judge.MARGIN`` worse than *right*), "fits" (*left* is better than *right* in
            *measure*, a column of ``fit``)
        text: a remark
    """

    kind: str
    left: str
    right: str = ""
    text: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        title: short summary
        source: paper and table
        sentence: quotation or paraphrase of the paper
        group: key of each scale in ``SCALES``
        systems: the first one is the baseline
        extras: additional measurements or pictures: "speed", "depth", "weights", "fit"
    """

    title: str
    source: str
    sentence: str
    group: str
    systems: tuple[System, ...]
    statements: tuple[Statement, ...]
    extras: tuple[str, ...] = ()


def _layers(encoder: int, decoder: int = 6) -> str:
    return f" --encoder-layers {encoder} --decoder-layers {decoder}"


def _both(layers: int) -> str:
    return _layers(layers, layers)


def _best(left: str, measure: str, *others: str) -> tuple[Statement, ...]:
    return tuple(Statement("fits", left, right, measure=measure) for right in others)


def _one_sided(side: str, clipped: str) -> tuple[System, System]:
    """Return systems of 12 + 12 layers with DS-Init in one stack, without and with gradient clipping at 1.0."""
    # the paper's 27.89 is "losing 0.66", which implies merged attention
    label, words = f"matt_ds_{side}_12", f"{POST} --{side}-deep-init ds --decoder-attn merged{_both(12)}"
    return System(label, words, "unstable"), System(f"{label}_clipped", f"{words} --clip-norm 1.0", clipped)


POST, PRE = "postnorm_6l --deep-init xavier", "prenorm_6l --deep-init xavier"
_BLEU = {"pre": {6: "27.1", 20: "28.9"}, "dlcl": {6: "27.3", 20: "28.80", 30: "29.3"}}


def _by_depth(name: str, line: str) -> dict[int, System]:
    """Return an architecture with 6 to 30 encoder layers, all with Xavier initialisation, as in Wang et al.'s code."""
    words, bleu = (PRE if name == "pre" else "dlcl_6l --deep-init xavier"), _BLEU[name]
    return {n: System(f"{name}_{n}", words + _layers(n), bleu.get(n, "-"), n, line) for n in (6, 12, 20, 30)}


_PRE, _DLCL = _by_depth("pre", "pre-norm"), _by_depth("dlcl", "DLCL")


def _ablation(label: str, flags: str, bleu: str) -> System:
    return System(label, f"{_DLCL[20].words} {flags}", bleu)


CLAIMS: dict[str, Claim] = {
    "deep-post-norm": Claim(
        "Deep post-norm stacks with Xavier initialisation do not train; with X20, Z19, DLCL or pre-norm they do",
        "X20 Tables 1 and 3, Z19 Table 3, W19 Table 1",
        "X20: 'deep v1 models do not suffer from convergence problem anymore with our new parameter initialization'",
        "deep",
        (
            System("xavier", POST + _both(18), "fails"),
            System("xavier_embnorm", f"{POST} --layernorm-embedding{_both(18)}", "fails"),
            System("lipschitz", f"postnorm_6l --deep-init lipschitz{_both(18)}", "29.05"),
            System("lipschitz_embnorm", f"postnorm_6l --deep-init lipschitz --layernorm-embedding{_both(18)}", "29.05"),
            System(
                "lipschitz_normal",
                f"postnorm_6l --deep-init lipschitz --lipschitz-embeddings normal --layernorm-embedding{_both(18)}",
            ),
            System("ds", f"postnorm_6l --deep-init ds{_both(18)}", "28.42 (20 + 20)"),
            System("dlcl_post", f"{POST} --layer-agg dlcl{_both(18)}", "29.2 (25 + 6)"),
            System("pre", PRE + _both(18), "28.60"),
        ),
        (
            Statement("fails", "xavier"),
            Statement("fails", "xavier_embnorm", text="the norm on the embeddings does not fix this"),
            Statement("trains", "lipschitz"),
            Statement("trains", "lipschitz_embnorm"),
            Statement("trains", "ds"),
            Statement("trains", "dlcl_post"),
            Statement("trains", "pre"),
            Statement("higher", "lipschitz_embnorm", "xavier_embnorm", "X20 against its own control"),
            Statement("higher", "lipschitz_embnorm", "pre", "v1 and v2 at 18 layers"),
            Statement("higher", "ds", "xavier"),
        ),
    ),
    "depth": Claim(
        "Deeper encoders translate better: plain pre-norm up to about 20 layers, DLCL up to 30",
        "W19 Figs. 3 and 4, Tables 1 and 6",
        "W19: 'both methods benefit from an increase in encoder depth at the beginning'; 'pre-norm Transformer "
        "degenerates earlier'; 'the speed decreases linearly with the number of encoder layers'",
        "depth",
        (*_PRE.values(), *_DLCL.values()),
        (
            Statement("higher", "pre_12", "pre_6"),
            Statement("higher", "pre_20", "pre_6"),
            Statement("higher", "pre_20", "pre_30", "the plain stack degenerates"),
            Statement("higher", "dlcl_12", "dlcl_6"),
            Statement("higher", "dlcl_20", "dlcl_6"),
            Statement("higher", "dlcl_30", "dlcl_6"),
            Statement("higher", "dlcl_30", "dlcl_20"),
            Statement("higher", "dlcl_6", "pre_6"),
            Statement("as good", "dlcl_20", "pre_20"),
            Statement("higher", "dlcl_30", "pre_30"),
            Statement("higher", "dlcl_30", "pre_20", "the deepest DLCL is better than the best plain stack"),
            Statement("faster", "dlcl_6", "dlcl_30"),
        ),
        ("speed", "depth"),
    ),
    "lstm": Claim(
        "RNN < plain < depth-wise LSTM, and deeper LSTMs are better",
        "X24 Tables 2 and 6",
        "X24: 'depth-wise LSTM outperforming the vanilla Transformer'; the RNN 'is able to converge, but its "
        "performance is much worse'",
        "pre",
        (
            System("pre_6", PRE, "27.55", 6, "pre-norm"),
            System("rnn_6", "rnn_6l", "23.24"),
            System("lstm_6", "lstm_6l", "28.53", 6, "LSTM"),
            System("pre_3_3", PRE + _both(3), "26.36", 3, "pre-norm"),
            System("lstm_3_3", "lstm_6l" + _both(3), "27.38", 3, "LSTM"),
            System("pre_12_12", PRE + _both(12), "28.12", 12, "pre-norm"),
            System("lstm_12_12", "lstm_6l" + _both(12), "29.26", 12, "LSTM"),
        ),
        (
            Statement("trains", "rnn_6"),
            Statement("higher", "pre_6", "rnn_6"),
            Statement("higher", "lstm_6", "pre_6"),
            Statement("higher", "lstm_6", "lstm_3_3"),
            Statement("higher", "lstm_12_12", "lstm_6"),
            Statement("higher", "lstm_3_3", "pre_3_3"),
            Statement("higher", "lstm_12_12", "pre_12_12"),
            Statement("higher", "lstm_6", "pre_12_12", "with half the layers"),
            Statement("faster", "lstm_6", "pre_12_12"),
            Statement("faster", "pre_6", "lstm_6"),
        ),
        ("speed", "depth"),
    ),
    "lstm-ablations": Claim(
        "The LSTM's hidden layer, merge and sharing",
        "X24 Tables 2 to 5",
        "X24: two layers are better than one, and one is better than the plain model; addition is better than "
        "concatenation; two LSTMs are best; sharing gates is better than sharing everything or nothing",
        "pre",
        (
            System("lstm_6", "lstm_6l", "28.53"),
            System("pre_6", PRE, "27.55"),
            System("lstm_1layer", "lstm_6l --lstm-ffn 1", "27.84"),
            System("lstm_narrow", "lstm_6l --lstm-hidden {hidden}", "28.20"),
            System("lstm_concat", "lstm_6l --lstm-merge concat", "28.26"),
            System("lstm_two", "lstm_6l --lstm-merge two", "28.81"),
            System("lstm_share_all", "lstm_6l --lstm-share all", "26.94"),
            System("lstm_share_none", "lstm_6l --lstm-share none", "28.25"),
            System("lstm_gate_encdec", "lstm_6l --lstm-share gate-encdec"),
        ),
        (
            Statement("higher", "lstm_6", "lstm_1layer"),
            Statement("higher", "lstm_1layer", "pre_6"),
            Statement("higher", "lstm_6", "lstm_narrow"),
            Statement("higher", "lstm_narrow", "pre_6"),
            Statement("higher", "lstm_6", "lstm_concat"),
            Statement("higher", "lstm_two", "lstm_6"),
            Statement("higher", "lstm_6", "lstm_share_all"),
            Statement("higher", "lstm_6", "lstm_share_none"),
            Statement("faster", "lstm_6", "lstm_two"),
        ),
        ("speed",),
    ),
    "merged-attention": Claim(
        "Merged attention keeps the quality and decodes faster",
        "Z19 Table 3, rows 1 to 7",
        "Z19: MAtt has 27.49 compared with 27.59, at 1.54 times the speed; with self-attention the factor is 1.03, "
        "with average attention 1.35",
        "post",
        (
            System("base", POST, "27.59"),
            System("t2t", PRE, "27.20"),
            System("ds", "postnorm_6l --deep-init ds", "27.50"),
            System("matt", f"{POST} --decoder-attn merged", "27.49"),
            System("matt_ds", "postnorm_6l --deep-init ds --decoder-attn merged", "27.35"),
            System("matt_self", f"{POST} --decoder-attn merged-self", "27.41"),
            System("matt_average", f"{POST} --decoder-attn merged-average", "27.36"),
            System("average", f"{POST} --decoder-attn average"),
        ),
        (
            Statement("higher", "base", "t2t", "post-norm is better than pre-norm at 6 layers"),
            Statement("as good", "ds", "base"),
            Statement("as good", "matt", "base"),
            Statement("as good", "matt_ds", "base"),
            Statement("as good", "matt_ds", "ds"),
            Statement("as good", "matt", "matt_self"),
            Statement("as good", "matt", "matt_average"),
            Statement("faster", "matt", "base"),
            Statement("faster", "matt", "matt_self"),
            Statement("faster", "matt", "matt_average"),
            Statement("faster", "matt_average", "base"),
        ),
        ("speed",),
    ),
    "one-sided": Claim(
        "DS-Init is required in both stacks; without it, deep stacks fail",
        "Z19 Table 3, rows 9 to 13, and Section 7.3; X20 Table 1 for 12 layers",
        "Z19: 'We also attempt to apply DS-Init on the encoder alone or the decoder alone for 12-layer models. "
        "Unfortunately, both variants lead to unstable optimization'",
        "post",
        (
            System("ds_12", f"postnorm_6l --deep-init ds{_both(12)}", "28.27"),
            System("base_12", POST + _both(12), "fails (over 12 layers)"),
            System("matt_12", f"{POST} --decoder-attn merged{_both(12)}", "fails (over 12 layers)"),
            System("matt_ds_12", f"postnorm_6l --deep-init ds --decoder-attn merged{_both(12)}", "28.55"),
            *_one_sided("encoder", "27.89"),
            *_one_sided("decoder", "fails"),
        ),
        (
            Statement("fails", "base_12"),
            Statement("fails", "matt_12"),
            Statement("trains", "ds_12"),
            Statement("trains", "matt_ds_12"),
            Statement("higher", "matt_ds_12", "matt_ds_encoder_12", "the latter is unstable"),
            Statement("higher", "matt_ds_12", "matt_ds_decoder_12", "the latter is unstable"),
            Statement("trains", "matt_ds_encoder_12_clipped", text="clipping at 1.0"),
            Statement("fails", "matt_ds_decoder_12_clipped", text="clipping at 1.0 does not help"),
            Statement("higher", "matt_ds_12", "matt_ds_encoder_12_clipped"),
            Statement("higher", "matt_ds_12", "ds_12"),
        ),
    ),
    "dlcl-ablations": Claim(
        "DLCL's learned weights and norms both help",
        "W19 Tables 1 and 6, Fig. 5",
        "W19: 28.80; without norms 28.67; with weights fixed at 1, 28.22, and at 1/N, 28.51 (28.23 without norms)",
        "depth",
        (
            _DLCL[20],
            _PRE[20],
            _ablation("dlcl_20_no_norm", "--dlcl-no-norm", "28.67"),
            _ablation("dlcl_20_one", "--dlcl-init one --dlcl-fixed", "28.22"),
            _ablation("dlcl_20_mean", "--dlcl-fixed", "28.51"),
            _ablation("dlcl_20_mean_no_norm", "--dlcl-fixed --dlcl-no-norm", "28.23"),
        ),
        (
            Statement("higher", "dlcl_20", "dlcl_20_no_norm"),
            Statement("higher", "dlcl_20", "dlcl_20_one"),
            Statement("higher", "dlcl_20", "dlcl_20_mean"),
            Statement("higher", "dlcl_20_mean", "dlcl_20_mean_no_norm"),
            Statement("higher", "dlcl_20_mean", "dlcl_20_one"),
            Statement("as good", "dlcl_20", "pre_20"),
        ),
        ("weights",),
    ),
    "generalisation": Claim(
        "Deep DS-Init fits best; with merged attention it generalises best; both are better than the base system",
        "Z19 Tables 3 and 4",
        "Z19: 'the success of DS-Init+MAtt comes from its better generalization rather than better fitting training "
        "data'",
        "post",
        (
            System("base", POST, "27.59 (dev 26.16, train 28.64)"),
            System("ds_12", f"postnorm_6l --deep-init ds{_both(12)}", "28.27 (dev 26.44, train 29.63)"),
            System("t2t_12", PRE + _both(12), "28.03 (dev 26.16, train 29.75)"),
            System(
                "matt_ds_12",
                f"postnorm_6l --deep-init ds --decoder-attn merged{_both(12)}",
                "28.55 (dev 26.51, train 29.43)",
            ),
        ),
        (
            Statement("higher", "ds_12", "base"),
            Statement("higher", "matt_ds_12", "base"),
            Statement("higher", "matt_ds_12", "ds_12"),
            Statement("higher", "ds_12", "t2t_12"),
            *_best("ds_12", "train_ppl", "base", "t2t_12", "matt_ds_12"),
            *_best("ds_12", "dev_ppl", "base", "t2t_12", "matt_ds_12"),
            *_best("t2t_12", "train_bleu", "base", "ds_12", "matt_ds_12"),
            *_best("matt_ds_12", "dev_bleu", "base", "ds_12", "t2t_12"),
            Statement("faster", "matt_ds_12", "ds_12"),
        ),
        ("fit", "speed"),
    ),
}
