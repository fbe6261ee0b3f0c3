"""The commands of examples/papers.txt, with plans in tests/snapshots: their models have the papers' parameters."""

import shlex

import pytest

from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers import snapshots
from tests.helpers.flags import parse
from tests.helpers.models import full_size, make_dictionary, size_of, task_of
from tests.helpers.paths import ROOT

A, N, T, Z = (f"examples/{name}/run.sh" for name in ("iwslt14_deen", "nist_zhen", "wmt18_enfi", "wmt18_zhen"))


@pytest.fixture(scope="module")
def dry_runs():
    """{command: its plan} of every row of the tables; test_snapshots.py compares the plans with the recipes."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(snapshots.FOLDER.glob("plan_*.txt")))
    plans = dict(plan.split("\n", 1) for plan in f"\n{text}".split("\n$ ")[1:])
    return {command: plans[command] for command in snapshots.papers()}


def counted(said, entries):
    """Parameters of the model that a command trains, whose dictionaries have so many entries."""
    line = next(line for line in said.splitlines() if line.startswith("fairseq-train "))
    args = parse(*(word for word in shlex.split(line.replace("ROOT", str(ROOT)))[2:] if word != "--fp16"))
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
    (f"{Z} --conf big_prenorm", [60000, 53280], "292.4"),
    # no vocabulary fits all systems: DLCL's are printed as 161.5M and 177.2M
    *((f"{Z} {deep}", [60000, target], count) for deep, counts in (
        ("--conf base_prenorm", ["102.1", "101.5"]), ("--conf dlcl_25l", ["162.1", "161.5"]),
        ("--conf dlcl_25l --arch transformer_dlcl_30l -- --deep-init xavier", ["177.8", "177.2"]),
    ) for target, count in zip((53280, 52100), counts)),
])  # fmt: skip
def test_parameters_are_the_papers(dry_runs, command, entries, paper):
    digits = len(paper.partition(".")[2])
    assert f"{counted(dry_runs[command], entries) / 1e6:.{digits}f}" == paper


def test_the_one_layer_big_model_of_x24_shares_no_gates():
    """Its 288.41M (with a bias of the output); with gates that layers share, the paper's default, it has 187.64M."""
    found = {}
    for share in ("none", "gate", "gate-encdec", "all"):
        name = "transformer_lstm_1layer_relative_12l_big"
        model = full_size(name, 35628, share_all_embeddings=True, lstm_share=share)
        found[share] = f"{(size_of(model) + 35628) / 1e6:.2f}"
    assert found == {"none": "288.41", "gate": "187.64", "gate-encdec": "181.35", "all": "147.76"}
