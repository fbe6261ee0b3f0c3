"""The tables of examples/papers.md: the settings of each command, compared with the papers'.

The settings here are written from the papers (and, where they are silent, from their authors' code), not from the
recipes: W19 sections 4.1 and 4.2, Z19 sections 7.1 to 7.4, X20 section 2, X24 section 3.1.
"""

import logging
import re
import shlex

import pytest

from fairseq_deep import list_archs
from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.flags import parse
from tests.helpers.models import full_size, make_dictionary, size_of, task_of
from tests.helpers.paths import ROOT
from tests.helpers.recipes import checked

LINES = [
    line for line in (ROOT / "examples/papers.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| table |")
]  # fmt: skip
COMMANDS = [re.fullmatch(r"\| .* \| `([^`]*)` \|", line)[1] for line in LINES]

SAME = {"lr_scheduler": "inverse_sqrt", "label_smoothing": "0.1", "weight_decay": "0.0", "clip_norm": "0.0"}
W19 = {
    **SAME, "adam_eps": "1e-8", "dropout": "0.1", "tokens": 32768, "max_update": "100000", "embeddings": "all",
    "average": "--last 5", "beam": "4", "lenpen": "0.6", "gnmt": False, "deep_init": "xavier", "bpe": "joint",
}  # fmt: skip
POST = {**W19, "adam_betas": "(0.9, 0.98)", "lr": "0.0007", "warmup_updates": "4000",
        "attention_dropout": "0.0", "activation_dropout": "0.0"}  # fmt: skip
PRE = {**W19, "adam_betas": "(0.9, 0.997)", "lr": "0.001", "warmup_updates": "8000",
       "attention_dropout": "0.1", "activation_dropout": "0.1"}  # fmt: skip
BIG = {"dropout": "0.3", "max_update": "300000"}
DEEP = {"lr": "0.002", "warmup_updates": "16000", "tokens": 65536, "max_update": None, "max_epoch": "20"}
CHINESE = {"beam": "6", "lenpen": "1.0", "embeddings": "target", "bpe": "per-side"}
NIST = {**PRE, **CHINESE, "max_update": "50000", "tests": 3, "max_words": "100"}
LARGE = {**PRE, **CHINESE, "max_update": "200000", "tests": 2}
HALF = {**DEEP, "max_epoch": "0"}  # half of the base's updates
Z19 = {
    **SAME, "adam_betas": "(0.9, 0.98)", "adam_eps": "1e-8", "lr": "6.988e-4", "warmup_updates": "4000",
    "dropout": "0.1", "attention_dropout": "0.1", "tokens": 24576, "max_update": "300000", "embeddings": "target",
    "average": "--last-updates 5", "interval": "5000", "beam": "4", "lenpen": "0.6", "gnmt": True, "bpe": "per-side",
    "merges": "32000", "tests": 5,
}  # fmt: skip
D12 = {**Z19, "dropout": "0.3", "attention_dropout": "0.2", "tokens": 40960}
D20 = {**D12, "tokens": 45056}
ZBIG = {**Z19, "adam_betas": "(0.9, 0.998)", "lr": "2.4705e-4", "warmup_updates": "16000", "dropout": "0.3",
        "tokens": 49152, "fp16": True}  # fmt: skip
ONE, LONG = {"tests": 1}, {"tests": 1, "max_update": "500000"}
TALKS = {**Z19, "dropout": "0.5", "attention_dropout": "0.3", "tokens": 40960, "merges": "30000", "bpe": "joint",
         "embeddings": "all", **ONE}  # fmt: skip
X24 = {
    **SAME, "adam_betas": "(0.9, 0.98)", "adam_eps": "1e-9", "lr": "6.988e-4", "warmup_updates": "4000",
    "dropout": "0.1", "attention_dropout": "0.1", "activation_dropout": "0.1", "tokens": 24576, "max_update": "100000",
    "embeddings": "all", "average": "--last-updates 5", "interval": "1500", "beam": "4", "lenpen": "0.6", "gnmt": True,
    "bpe": "joint", "merges": "32000", "max_subwords": "256", "tests": 1,
}  # fmt: skip
XBIG = {**X24, "lr": "4.941e-4", "dropout": "0.3", "max_update": "300000", "average": "--last-updates 20"}
X20 = {**X24, "lr": "4.941e-4", "warmup_updates": "8000", "lenpen": "0", "gnmt": False}
V1 = {**X20, "deep_init": "xavier", "layernorm_embedding": ""}
LI = {**XBIG, "tokens": 65536, "lr": "0.002", "warmup_updates": "16000", "adam_betas": "(0.9, 0.997)"}
XAVIER, OTHER = {"deep_init": "xavier"}, {"deep_init": None}

M, E, F = "./run_wmt16_ende.sh", "examples/wmt14_ende/run.sh", "examples/wmt14_enfr/run.sh"
C, Z, N = "examples/wmt15_csen/run.sh", "examples/wmt18_zhen/run.sh", "examples/nist_zhen/run.sh"
T, A = "examples/wmt18_enfi/run.sh", "examples/iwslt14_deen/run.sh"
# (recipe, architecture, settings)
ROWS = [
    (M, "postnorm_6l", POST), (M, "postnorm_6l_big", {**POST, **BIG, "lr": "0.0005"}),
    (M, "postnorm_20l", {**POST, **DEEP}), (M, "dlcl_postnorm_6l", POST),
    (M, "dlcl_postnorm_25l", {**POST, **DEEP}), (M, "prenorm_6l", PRE),
    (M, "prenorm_6l_big", {**PRE, **BIG, "lr": "0.0007"}), (M, "prenorm_20l", {**PRE, **DEEP}), (M, "dlcl_6l", PRE),
    (M, "dlcl_30l", {**PRE, **DEEP}), (M, "transparent_16l", {**POST, **DEEP}),
    (M, "dlcl_postnorm_16l", {**POST, **DEEP}), (M, "prenorm_16l", {**PRE, **DEEP}), (M, "dlcl_16l", {**PRE, **DEEP}),
    (N, "prenorm_6l", NIST), (N, "prenorm_6l_big", {**NIST, **BIG, "lr": "0.0007", "max_update": "100000"}),
    (N, "prenorm_25l", {**NIST, **HALF, "max_update": "25000"}), (N, "dlcl_6l", NIST),
    (N, "dlcl_25l", {**NIST, **HALF, "max_update": "25000"}),
    (Z, "prenorm_6l", LARGE), (Z, "prenorm_6l_big", {**LARGE, **BIG, "lr": "0.0007", "max_update": "500000"}),
    (Z, "dlcl_25l", {**LARGE, **HALF, "max_update": "100000"}),
    (Z, "dlcl_30l", {**LARGE, **HALF, "max_update": "100000"}),
    *((M, "prenorm_6l", {**PRE, "decoder_layers": depth}) for depth in "468"), (M, "dlcl_20l", {**PRE, **DEEP}),
    (M, "dlcl_20l", {**PRE, **DEEP, "dlcl_no_norm": ""}), (M, "dense_sum_20l", {**PRE, **DEEP}),
    (M, "dense_20l", {**PRE, **DEEP}), (M, "dense_nonorm_20l", {**PRE, **DEEP}),
    (M, "prenorm_6l_big_encoder", {**PRE, "embeddings": "target"}),
    (M, "dlcl_12l_big", {**PRE, **BIG, "lr": "0.0007"}),
    (E, "postnorm_6l", {**Z19, **XAVIER}), (E, "prenorm_6l", {**Z19, **XAVIER}), (E, "ds_6l", {**Z19, **OTHER}),
    (E, "matt_6l", {**Z19, **OTHER}), (E, "ds_matt_6l", {**Z19, **OTHER}),
    (E, "postnorm_6l", {**Z19, **XAVIER, "decoder_attn": "merged-self"}),
    (E, "postnorm_6l", {**Z19, **XAVIER, "decoder_attn": "merged-average"}),
    (E, "postnorm_6l", {**Z19, **XAVIER, "tokens": 49152}),
    (E, "postnorm_18l", {**Z19, **XAVIER, "tokens": 49152, "decoder_layers": "18"}),
    (E, "matt_6l", {**Z19, **OTHER, "tokens": 49152, "encoder_layers": "18", "decoder_layers": "18"}),
    (E, "ds_12l12l", {**D12, **OTHER}), (E, "prenorm_12l", {**D12, **XAVIER, "decoder_layers": "12"}),
    (E, "ds_matt_12l12l", {**D12, **OTHER}), (E, "ds_20l20l", {**D20, **OTHER}),
    (E, "prenorm_20l", {**D20, **XAVIER, "decoder_layers": "20"}), (E, "ds_matt_20l20l", {**D20, **OTHER}),
    *((E, "ds_matt_12l12l", {**D12, "clip_norm": "1.0", f"{side}_deep_init": "xavier", **OTHER})
      for side in ("decoder", "encoder")),
    (E, "ds_matt_18l18l", {**D20, "tokens": 43008}), (E, "ds_matt_30l30l", {**D20, "tokens": 49152}),
    (E, "postnorm_6l", {**Z19, **XAVIER, "tests": 2}),
    (F, "postnorm_6l", {**Z19, **LONG}), (F, "ds_matt_12l12l", {**D12, **LONG}),
    (A, "postnorm_6l", {**TALKS, **XAVIER, "tokens": 24576}), (A, "ds_matt_12l12l", {**TALKS, **OTHER}),
    (T, "postnorm_6l", {**Z19, **ONE}), (T, "ds_matt_12l12l", {**D12, **ONE}),
    (Z, "postnorm_6l", {**Z19, **LONG}), (Z, "ds_matt_12l12l", {**D12, **LONG}),
    (E, "postnorm_6l_big", {**ZBIG, **XAVIER}), (E, "ds_matt_12l12l_big", {**ZBIG, "tokens": 55296, **OTHER}),
    (E, "ds_matt_20l20l_big", {**ZBIG, "tokens": 55296, **OTHER}),
    (E, "postnorm_6l", V1), (E, "postnorm_6l", {**V1, "encoder_layers": "12", "decoder_layers": "12"}),
    (E, "prenorm_6l", {**X20, **XAVIER}),
    *((E, f"prenorm_{n}l", {**X20, **XAVIER, "decoder_layers": str(n)}) for n in (12, 18, 24)),
    *((E, f"lipschitz_postnorm_{depth}", X20) for depth in ("6l", "12l12l", "18l18l", "24l24l")),
    *((E, f"lipschitz_{depth}", X20) for depth in ("6l", "12l12l", "18l18l", "24l24l")),
    (E, "lipschitz_postnorm_24l", X20), (E, "lipschitz_postnorm_6l24l", X20),
    (C, "postnorm_6l", V1), (C, "lipschitz_postnorm_24l24l", X20),
    (E, "prenorm_6l", {**X24, **XAVIER}), (E, "lstm_6l", X24),
    (E, "lstm_6l", {**X24, "lstm_no_attn_residual": "", "lstm_forget_bias": "0"}),
    (E, "prenorm_6l_big", {**XBIG, **XAVIER}),
    (E, "lstm_6l_big", XBIG), (F, "prenorm_6l", {**X24, **XAVIER}), (F, "lstm_6l", X24),
    (F, "prenorm_6l_big", {**XBIG, **XAVIER, "dropout": "0.1"}), (F, "lstm_6l_big", {**XBIG, "dropout": "0.1"}),
    (E, "rnn_6l", X24), (E, "lstm_6l", {**X24, "lstm_share": "gate-encdec"}), (E, "lstm_1layer_6l", X24),
    (E, "lstm_6l", {**X24, "lstm_share": "gate-encdec", "lstm_hidden": "1536"}),
    *((E, f"lstm_{kind}_6l", X24) for kind in ("concat", "two", "share_all", "share_none")),
    (E, "prenorm_6l", {**X24, **XAVIER, "encoder_layers": "3", "decoder_layers": "3"}),
    *((E, f"prenorm_{n}l", {**X24, **XAVIER, "decoder_layers": str(n)}) for n in (12, 18, 24)),
    *((E, f"lstm_{n}l{n}l", X24) for n in (3, 12, 18, 24)),
    (E, "lstm_12l12l_big", XBIG), (E, "lstm_relative_12l_big", LI), (E, "lstm_1layer_relative_12l_big", LI),
    (C, "lstm_6l", X24), (C, "prenorm_6l", {**X24, **XAVIER}), (C, "lstm_12l12l_big", XBIG),
    (C, "transparent_16l", {**X24, **XAVIER}),
    *((E, name, {**(XBIG if name.endswith("big") else X24), **XAVIER}) for name in (
        "transparent_16l", "hierarchical_6l", "hierarchical_6l_big", "routing_6l", "routing_6l_big", "sdu_6l",
        "luna_6l", "ode_24l", "ode_12l_big",
    )),
]  # fmt: skip


def dry_run(command):
    program, *words = shlex.split(command)
    done = checked(ROOT / program, "--dry-run", "--ngpu", "8", "--exp", "/nowhere/at/all", *words)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dry_runs():
    return {command: dry_run(command) for command in COMMANDS}


def flags(words):
    """{flag: its last value}, "" for one without."""
    found, flag = {}, None
    for word in words:
        if word.startswith("--"):
            flag = word[2:].replace("-", "_")
            found[flag] = ""
        elif flag:
            found[flag] = word
    return found


def planned(said):
    """What a dry run would do, under the names of the tables above."""
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith(("fairseq-", "# subwords "))]
    kinds = {}
    for words in commands:
        kinds.setdefault(words[words[0] == "#"], []).append(flags(words))
    train, generate, cut = kinds["fairseq-train"][0], kinds["fairseq-generate"], kinds["subwords"][0]
    joined = "joined_dictionary" in kinds["fairseq-preprocess"][0]
    assert joined == (cut["bpe"] == "joint")
    tests = sum(each["gen_subset"] != "valid" for each in generate)
    assert len(kinds["fairseq-preprocess"][0]["testpref"].split(",")) == tests
    found = {name: train.get(name) for row in (X24, PRE, DEEP) for name in row}
    found.update({name: train.get(name) for name in ("decoder_attn", "lstm_share", "lstm_hidden", "dlcl_no_norm")})
    names = ("layernorm_embedding", "lstm_no_attn_residual", "lstm_forget_bias")
    found.update({name: train.get(name) for name in names})
    found.update({name: train.get(name) for name in ("encoder_layers", "decoder_layers", "deep_init")})
    found.update({name: train.get(name) for name in ("encoder_deep_init", "decoder_deep_init")})
    found.update(
        arch=train["arch"], fp16="fp16" in train, interval=train.get("save_interval_updates"), bpe=cut["bpe"],
        embeddings="all" if "share_all_embeddings" in train else "target", merges=cut["bpe_merges"],
        max_subwords=cut["max_subwords"], max_words=cut["max_words"], beam=generate[0]["beam"],
        tests=tests, gnmt="gnmt_lenpen" in generate[0],
        lenpen=generate[0]["lenpen"], tokens=int(re.search(r"= ([\d,]+) tokens per", said)[1].replace(",", "")),
        average=next(" ".join(words[2:4]) for words in commands if words[:2] == ["fairseq-deep", "average"]),
    )  # fmt: skip
    return found


def test_every_row_has_its_settings(dry_runs):
    assert len(COMMANDS) == len(ROWS) == len(set(COMMANDS))
    for command, (program, arch, settings) in zip(COMMANDS, ROWS):
        assert command.split()[0] == program, command
        found = planned(dry_runs[command])
        assert found["arch"] == f"transformer_{arch}" and found["arch"] in list_archs(), command
        wrong = {name: (found[name], value) for name, value in settings.items() if found[name] != value}
        assert not wrong, f"{command}: (found, paper's) {wrong}"
        extra = set(shlex.split(command)) & {
            "--decoder-attn", "--encoder-layers", "--decoder-layers", "--dlcl-no-norm", "--clip-norm", "--deep-init",
            "--encoder-deep-init", "--decoder-deep-init", "--layernorm-embedding", "--lstm-share",
        }  # fmt: skip
        assert {flag[2:].replace("-", "_") for flag in extra} <= set(settings), command


def test_fairseq_knows_every_flag(dry_runs):
    """With its own parser, which also refuses what an architecture does not have."""
    from fairseq import options

    logging.disable(logging.CRITICAL)
    trains = {line for said in dry_runs.values() for line in said.splitlines() if line.startswith("fairseq-train ")}
    assert len(trains) > 80
    for line in sorted(trains):
        words = [word for word in shlex.split(line)[1:] if word != "--fp16"]  # which wants a GPU
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        assert args.max_update or args.max_epoch, line
    logging.disable(logging.NOTSET)


def counted(said, entries):
    """Parameters of the model that a command trains, whose dictionaries have so many entries."""
    line = next(line for line in said.splitlines() if line.startswith("fairseq-train "))
    args = parse(*(word for word in shlex.split(line)[2:] if word != "--fp16"))
    with skip_initialisation():
        model = DeepTransformerModel.build_model(args, task_of(*map(make_dictionary, entries)))
    return size_of(model)


# The papers' counts in millions, at vocabularies that fit them (they print none for these tasks). Z19, Table 5, De-En:
# joint BPE of 30,000 merges, one table for both languages. W19, Table 4: both sides together.
@pytest.mark.parametrize("command, entries, paper", [
    (f"{A} --conf zhang --arch transformer_postnorm_6l --max-tokens 3072 --batch-tokens 24576 -- --deep-init xavier",
     [32000], "61"), (f"{A} --conf zhang", [32000], "92"),
    *((f"{N} --conf {conf}", [44650, 33650], count) for conf, count in (
        ("base_prenorm", "84"), ("big_prenorm", "257"), ("prenorm_25l", "144"), ("dlcl_25l", "144"))),
    (f"{T} --conf zhang_6l", [20000, 20000], "65"), (f"{T} --conf ds_matt_12l12l", [20000, 20000], "96"),
    (f"{Z} --conf base_prenorm", [60000, 53280], "102.1"), (f"{Z} --conf big_prenorm", [60000, 53280], "292.4"),
])  # fmt: skip
def test_parameters_are_the_papers(dry_runs, command, entries, paper):
    digits = len(paper.partition(".")[2])
    assert f"{counted(dry_runs[command], entries) / 1e6:.{digits}f}" == paper


def test_no_vocabulary_fits_all_systems_of_w19_table_4(dry_runs):
    """DLCL's printed 161.5M and 177.2M fit some 1,200 entries fewer than the base and big models have."""
    deep = [f"{Z} --conf dlcl_25l", f"{Z} --conf dlcl_25l --arch transformer_dlcl_30l -- --deep-init xavier"]
    found = {
        entries: [f"{counted(dry_runs[command], [60000, entries - 60000]) / 1e6:.1f}" for command in deep]
        for entries in (113280, 112100)
    }
    assert found == {113280: ["162.1", "177.8"], 112100: ["161.5", "177.2"]}
    assert counted(dry_runs[f"{Z} --conf base_prenorm"], [60000, 52100]) < 101.6e6


def test_the_one_layer_big_model_of_x24_shares_no_gates():
    """Its 288.41M (with a bias of the output); with gates that layers share, the paper's default, it has 187.64M."""
    found = {}
    for share in ("none", "gate", "gate-encdec", "all"):
        name = "transformer_lstm_1layer_relative_12l_big"
        model = full_size(name, 35628, share_all_embeddings=True, lstm_share=share)
        found[share] = f"{(size_of(model) + 35628) / 1e6:.2f}"
    assert found == {"none": "288.41", "gate": "187.64", "gate-encdec": "181.35", "all": "147.76"}
