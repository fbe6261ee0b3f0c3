"""``examples/claims``: what the claims ask for, how statements are judged, and what is refused."""

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_deep.tools import UserError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/claims"


@pytest.fixture(scope="module")
def claims():
    """The modules of the command by name; they find each other by their folders."""
    folders = [str(ROOT / "examples" / name) for name in ("claims", "compare", "common")]
    sys.path[:0] = folders
    names = ("definitions", "scales", "judge", "page", "speed", "fit", "claims")
    yield {name: importlib.import_module(name) for name in names}
    for folder in folders:
        sys.path.remove(folder)


def run(*words):
    environment = {**os.environ, "FAIRSEQ_DEEP_ENV": "current", "FAIRSEQ_DEEP_CHECKED": shutil.which("python") or ""}
    command = [str(FOLDER / "run.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_each_statement_is_about_systems_of_its_claim(claims):
    """And within a group, in which trainings are shared, a label stands for one system."""
    known = {}
    for claim in claims["definitions"].CLAIMS.values():
        labels = [system.label for system in claim.systems]
        assert len(set(labels)) == len(labels)
        for statement in claim.statements:
            assert statement.left in labels
            assert (statement.right in labels) is (statement.kind not in ("trains", "fails"))
            assert bool(statement.measure) is (statement.kind == "fits")
        for system in claim.systems:
            assert known.setdefault((claim.group, system.label), system.words) == system.words
            assert (system.depth is None) is (system.line == "")
    groups = {group for group, _ in known}
    assert all(set(scale) == groups for scale in claims["scales"].SCALES.values())


def record(label, **seeds):
    """A trained system: figures of each seed by ``s1=...``."""
    found = {int(name[1:]): {"source_gain": 2.0, **figures} for name, figures in seeds.items()}
    return {"label": label, "done": list(found), "seeds": found, "failed": {}, "folders": {}}


def scored(label, *scores):
    return record(label, **{f"s{seed}": {"bleu": score, "valid_loss": 5.0} for seed, score in enumerate(scores, 1)})


@pytest.mark.parametrize(
    "left, right, chances, verdict",
    [
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.02), "yes"),
        ((12.0,), (11.0,), (0.01,), "yes (one seed)"),
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.03), "not clear"),
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.20), "not clear"),
        ((12.0, 11.0), (11.0, 11.5), (0.01, 0.01), "not clear"),
        ((10.0, 10.0), (11.0, 11.5), (0.01, 0.01), "no"),
        ((12.0, 12.1, 12.2), (11.0, 11.1, 11.2), (0.3, 0.3, 0.3), "yes"),  # each seed by the same: certain over seeds
        ((0.3, 0.3), (0.1, 0.1), (0.01, 0.01), "not clear"),
        ((), (11.0,), (), "open"),
    ],
)
def test_higher(left, right, chances, verdict, claims, monkeypatch):
    judge = claims["judge"]

    def bootstrap(rows, resamples):
        assert [row["system"] for row in rows] == ["b", "a"], "the left one is tested against the right one"
        for seed in rows[0]["done"]:
            rows[1]["seeds"][seed]["p"] = chances[seed - 1]

    monkeypatch.setattr(judge, "bootstrap", bootstrap)
    statement = claims["definitions"].Statement("higher", "a", "b")
    found = judge.judge(statement, [scored("a", *left), scored("b", *right)], {}, {}, 1000)
    assert found["verdict"] == verdict and found["text"] == "a is better than b"
    if verdict == "yes" and len(left) == 2:
        assert found["found"] == "+1.25 BLEU [+1.00, +1.50], p 0.010 0.020"


@pytest.mark.parametrize("left, chances, verdict", [
    ((11.2, 11.1), (0.5, 0.5), "yes"), ((10.8, 10.9), (0.3, 0.3), "yes"), ((10.8, 10.9), (0.01, 0.01), "no"),
    ((9.0, 9.0), (0.3, 0.01), "not clear"), ((11.0,), (1.0,), "yes (one seed)"),
])  # fmt: skip
def test_as_good(left, chances, verdict, claims, monkeypatch):
    def bootstrap(rows, resamples):
        for seed in rows[0]["done"]:
            rows[1]["seeds"][seed]["p"] = chances[seed - 1]

    monkeypatch.setattr(claims["judge"], "bootstrap", bootstrap)
    statement = claims["definitions"].Statement("as good", "a", "b")
    found = claims["judge"].judge(statement, [scored("a", *left), scored("b", 11.0, 11.0)], {}, {}, 1000)
    assert found["verdict"] == verdict


def test_judged_by_sacrebleus_bootstrap_on_what_the_recipe_left(claims, tmp_path):
    """Real files: better translations are found to be better, and twice the same text is no difference."""
    lines = [f"Satz {number} hat sieben Wörter und eine {number * 7} ." for number in range(60)]
    texts = {"good": lines, "bad": [line.replace("hat sieben", "ist") for line in lines]}
    records = []
    for label, hypotheses in texts.items():
        folder = tmp_path / "runs" / label / "seed1"
        folder.mkdir(parents=True)
        for kind, text in (("hyp", hypotheses), ("ref", lines)):
            (folder / f"test.{kind}.de").write_text("\n".join(text) + "\n", encoding="utf-8")
        table = {"system": label, "done": [1], "seeds": {"1": {"bleu": 100.0 if label == "good" else 60.0}},
                 "failed": {}, "wanted": [1]}  # fmt: skip
        records.append(table)
    definitions, judge = claims["definitions"], claims["judge"]
    systems = tuple(definitions.System(label, "prenorm_6l") for label in texts)
    claim = definitions.Claim("", "", "", "pre", systems, ())
    found = judge.systems(claim, {"systems": records}, str(tmp_path))
    assert [record["folders"][1] for record in found] == [str(tmp_path / "runs" / label / "seed1") for label in texts]
    statement = definitions.Statement
    pairs = (("good", "bad"), ("bad", "good"))
    verdicts = [judge.judge(statement("higher", *pair), found, {}, {}, 200) for pair in pairs]
    assert [verdict["verdict"] for verdict in verdicts] == ["yes (one seed)", "no"]
    same = judge.judge(statement("higher", "good", "good"), found, {}, {}, 200)
    assert same["verdict"] == "not clear" and same["found"] == "+0.00 BLEU, p 1.000"


def test_missing_seeds_are_told(claims, monkeypatch):
    monkeypatch.setattr(claims["judge"], "bootstrap", lambda rows, _: rows[1]["seeds"][1].update(p=0.001))
    left = {**scored("a", 12.0), "wanted": [1, 2, 3]}
    statement = claims["definitions"].Statement("higher", "a", "b")
    found = claims["judge"].judge(statement, [left, scored("b", 11.0)], {}, {}, 1000)
    assert found["found"].startswith("+1.00 BLEU (1 of 3 seeds)")


def test_losses_decide_where_nothing_is_translated(claims):
    records = [
        record(label, **{f"s{seed}": {"valid_loss": loss + 0.01 * seed * (label == "b")} for seed in (1, 2, 3)})
        for label, loss in (("a", 5.0), ("b", 6.0))
    ]
    statement = claims["definitions"].Statement("higher", "a", "b")
    found = claims["judge"].judge(statement, records, {}, {}, 1000)
    assert found["verdict"] == "yes" and found["found"].startswith("+1.02 loss [+1.01, +1.03], over seeds 0.000")


@pytest.mark.parametrize("kind, gains, verdict", [
    ("trains", (0.5, 0.2), "yes"), ("trains", (0.5, 0.05), "not clear"), ("trains", (0.0, 0.05), "no"),
    ("fails", (0.0, 0.05), "yes"), ("fails", (0.5, 0.05), "not clear"), ("fails", (0.5, 0.2), "no"),
    ("trains", (), "open"), ("trains", (0.5,), "yes (one seed)"), ("fails", (0.0,), "yes (one seed)"),
])  # fmt: skip
def test_training_is_to_use_the_source(kind, gains, verdict, claims):
    own = record("a", **{f"s{seed}": {"source_gain": gain} for seed, gain in enumerate(gains, 1)})
    statement = claims["definitions"].Statement(kind, "a")
    assert claims["judge"].judge(statement, [own], {}, {}, 1000)["verdict"] == verdict


@pytest.mark.parametrize("reason, fails, trains", [
    ("FloatingPointError: gradients are Nan/Inf", "yes", "not clear"),
    ("FloatingPointError: Minimum loss scale reached (0.0001)", "yes", "not clear"),
    ("exit status 137", "open", "yes (one seed)"), ("no space left on device", "open", "yes (one seed)"),
])  # fmt: skip
def test_a_loss_that_is_no_number_counts_as_failed_and_a_crash_of_the_machine_does_not(reason, fails, trains, claims):
    judge, Statement = claims["judge"], claims["definitions"].Statement
    broken = {**record("a"), "failed": {"1": reason, "2": reason}, "wanted": [1, 2]}
    assert judge.judge(Statement("fails", "a"), [broken], {}, {}, 1000)["verdict"] == fails
    half = {**record("a", s1={"source_gain": 0.5}), "failed": {"2": reason}, "wanted": [1, 2]}
    assert judge.judge(Statement("trains", "a"), [half], {}, {}, 1000)["verdict"] == trains


def test_times_are_read_from_what_fairseq_prints(claims):
    """Its lines at the end of a translation and in a training's json log."""
    line = "NOTE | Translated 1,000 sentences (9,459 tokens) in 11.0s (90.96 sentences/s, 860.40 tokens/s)"
    assert claims["speed"].SPEED.findall(line) == [("90.96", "860.40")]
    steps = [(4000.0, 1000.0), (2000.0, 1000.0), (1000.0, 1000.0), (500.0, 1000.0)]
    form = '| train_inner | {{"loss": "9", "wps": "{}", "ups": "2", "wpb": "{}", "bsz": "5"}}'
    log = "\n".join(form.format(rate, batch) for rate, batch in steps)
    assert claims["speed"]._median_step(log, "here") == 1.0
    with pytest.raises(UserError, match="here: fairseq-train logged no steps"):
        claims["speed"]._median_step("", "here")


def test_faster_needs_rounds_that_do_not_overlap(claims):
    statement = claims["definitions"].Statement("faster", "a", "b")
    records = [scored("a", 10.0), scored("b", 10.0)]
    for rounds, verdict in (((110, 120), "yes"), ((90, 120), "not clear"), ((80, 70), "no")):
        timed = {"a": {"tokens_per_second": 110, "rounds": rounds}}
        timed["b"] = {"tokens_per_second": 100, "rounds": (100, 95)}
        assert claims["judge"].judge(statement, records, timed, {}, 1000)["verdict"] == verdict
    assert claims["judge"].judge(statement, records, {}, {}, 1000)["verdict"] == "open"


def test_fits_compares_one_measure(claims):
    records = [scored("a", 10.0), scored("b", 10.0)]
    fitted = {"a": {"train_ppl": 3.0, "dev_bleu": 20.0}, "b": {"train_ppl": 4.0, "dev_bleu": 21.0}}
    fits = [claims["definitions"].Statement("fits", "a", "b", measure=name) for name in ("train_ppl", "dev_bleu")]
    verdicts = [claims["judge"].judge(statement, records, {}, fitted, 1000) for statement in fits]
    assert [verdict["verdict"] for verdict in verdicts] == ["yes (one seed)", "no"]
    assert verdicts[0]["text"] == "a is better than b in train ppl"


@pytest.mark.parametrize("values", [
    (1.0, 2.0, 4.0), (2.0, 2.001, 2.002), (0.3, -0.2, 0.5, 0.9), (1.0, 1.2, 0.9, 1.1, 1.3),
])  # fmt: skip
def test_p_over_seeds_is_students(values, claims):
    """For two degrees of freedom in closed form, else from the known quantiles of the distribution, by simulation."""
    n = len(values)
    mean = sum(values) / n
    t = mean / math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    p = claims["judge"].p_over_seeds(list(values))
    if n == 3:
        assert p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-9)
    else:
        import torch

        torch.manual_seed(1)
        drawn = torch.distributions.StudentT(float(n - 1)).sample((400000,)).abs()
        assert p == pytest.approx(float((drawn > t).double().mean()), abs=0.004)
    assert claims["judge"].p_over_seeds(list(values[:2])) is None


def test_loss_at_equal_time(claims):
    """Where the slower system was when the faster one had done all of its updates."""
    records = [
        {"label": "fast", "done": [1], "curve": {"1": {"10": 6.0, "20": 5.0}}},
        {"label": "slow", "done": [1], "curve": {"1": {"10": 4.0, "20": 3.0}}},
    ]
    timed = {"fast": {"step_seconds": 1.0}, "slow": {"step_seconds": 4 / 3}}
    losses = claims["page"].losses_at_equal_time(records, timed)
    assert {label: loss["mean"] for label, loss in losses.items()} == {"fast": 5.0, "slow": pytest.approx(3.5)}


def test_list_names_every_claim(claims):
    done = run("--list")
    assert done.returncode == 0, done.stderr
    assert all(f"\n{name} " in done.stdout for name in claims["definitions"].CLAIMS)


@pytest.fixture
def text(tmp_path):
    """make(train, test): a folder of parallel text with so many pairs."""

    def make(**pairs):
        for split, count in {"train": 5000, "valid": 5, "test": 200, **pairs}.items():
            for language in ("en", "de"):
                (tmp_path / f"{split}.{language}").write_text("ein Wort und noch eins\n" * count)
        return tmp_path

    return make


def check(claims, *names, **options):
    """What ``run.sh`` does before it trains, without the seconds that it takes to load."""
    values = dict(list="false", scale="mini", data="", demo="false", source_lang="en", target_lang="de", seeds="1",
                  updates="auto", jobs="1", exp="none", ngpu="auto", precision="fp32", workers="auto", resamples="1000",
                  speed="true", rounds="3", dry_run="false", table_only="false")  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**values, **options}.items()]
    claims["claims"].check(claims["claims"].parse([*flags, "--", str(len(names)), *names]))


def test_what_cannot_work_is_refused_before_anything_starts(claims, text, tmp_path):
    small = text(train=100)
    cases = [
        ((), {}, "no claim named"),
        (("dept",), {"data": small}, "there is no claim 'dept' (did you mean depth?): --list shows them"),
        (("depth",), {}, "--data is missing"),
        (("depth",), {"data": small}, "100 sentence pairs of train, too few to judge a claim: give 5,000 or more"),
        (("depth",), {"demo": "true", "data": small}, "--data and --demo exclude each other"),
        (("depth",), {"demo": "true", "resamples": "10"}, "--resamples 10 is too few"),
    ]
    for names, options, message in cases:
        with pytest.raises(UserError) as error:
            check(claims, *names, **options)
        assert message in str(error.value)
    exp = tmp_path / "exp"
    for words, message in (((), "no claim named"), (("depth", "--demo", "--rounds", "0"), "--rounds takes a whole")):
        done = run("--exp", exp, *words)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not exp.exists()


def test_too_few_test_sentences(claims, text):
    with pytest.raises(UserError, match="10 sentence pairs of test"):
        check(claims, "lstm", data=text(test=10))


def test_every_system_is_known_to_fairseq_train(claims, monkeypatch):
    """As compare sees it before it trains anything: flags parsed, and each model built without memory."""
    modules, definitions = importlib.import_module("systems"), claims["definitions"]
    base = "fairseq-train DATA --arch transformer --task translation --share-all-embeddings --encoder-embed-dim 128"
    base += " --decoder-embed-dim 128 --encoder-attention-heads 4 --decoder-attention-heads 4"
    known = [system for claim in definitions.CLAIMS.values() for system in claim.systems]
    words = sorted({f"{system.label}={system.words.format(hidden=384)}" for system in known})
    systems = [modules.read_systems([word], "")[0] for word in words]
    modules.check(systems, base.split(), 128)
    assert len(systems) >= 45 and all(system.ours for system in systems)


def test_plan_of_a_claim(text, tmp_path):
    done = run("--dry-run", "--exp", tmp_path / "exp", "--data", text(), "--ngpu", "0", "generalisation")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fairseq-train ") == 4 and not (tmp_path / "exp").exists()


def test_page_says_what_was_found(claims, tmp_path):
    definitions = claims["definitions"]
    claim = definitions.CLAIMS["generalisation"]
    spread = {"mean": 20.0, "min": 19.0, "max": 21.0, "std": 1.0}
    common = {"bleu": spread, "valid_loss": None, "command": "arch", "parameters": 1234, "curve": {}}
    records = [{**scored(system.label, 19.0, 21.0), "paper": system.paper, **common} for system in claim.systems]
    verdicts = [{"text": "a is better than b", "found": "+1.00 BLEU", "verdict": "no", "why": "because"}]
    fitted = {claim.systems[0].label: {"train_bleu": 1.5, "dev_bleu": 1.25, "train_ppl": 3.0, "dev_ppl": 4.0}}
    text = claims["page"].write(str(tmp_path), claim, records, verdicts, {"updates": "10"}, {}, fitted)
    assert (tmp_path / "claim.md").read_text() == text
    line = next(line for line in text.splitlines() if line.startswith("| base "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["base", claim.systems[0].paper, "2", "1,234", "20.00 [19.00, 21.00]"]
    assert cells[5:] == ["1.50", "1.25", "3.00", "4.00"]
    assert "| no (because)" in text and claim.sentence in text


class FakeCompare:
    """Stands for ``subprocess.run`` of the comparison: notes the command, and leaves a table as it would."""

    def __init__(self, returncode=0, leave_out=()):
        self.returncode, self.leave_out, self.commands = returncode, leave_out, []

    def __call__(self, command, **_):
        self.commands.append(command)
        value = dict(zip(command, command[1:]))
        labels = [word.partition("=")[0] for word in command[: command.index("--")] if "=" in word]
        figures = {"bleu": 0.5, "valid_loss": 5.0, "source_gain": 2.0}
        spread = {"mean": 0.5, "min": 0.5, "max": 0.5, "std": None}
        rows = [
            {"system": label, "done": [1], "seeds": {"1": figures}, "failed": {}, "curve": {"1": {}}, "bleu": spread}
            for label in labels
            if label not in self.leave_out
        ]
        Path(value["--tables"]).mkdir(parents=True, exist_ok=True)
        (Path(value["--tables"]) / "table.json").write_text(json.dumps({"systems": rows, "updates": "4"}))
        return subprocess.CompletedProcess(command, self.returncode)


@pytest.fixture
def started(claims, tmp_path, monkeypatch):
    """started(compare, *words): the exit status of the command, with *compare* in the place of the comparison."""

    def start(compare, *words, names=("one-sided",)):
        fixed = {"list": "false", "scale": "mini", "data": "", "demo": "true", "source-lang": "en", "target-lang": "de"}
        fixed.update(seeds="2", updates="4", jobs="1", exp=str(tmp_path), ngpu="0", precision="fp32", workers="1")
        fixed.update(resamples="100", speed="true", rounds="1", **{"dry-run": "false", "table-only": "false"})
        line = [word for flag, value in fixed.items() for word in (f"--{flag}", value)]
        rest = ["--", str(len(names)), *names, "--clip-norm", "1"]
        monkeypatch.setattr(sys, "argv", ["claims.py", *line, *words, *rest])
        monkeypatch.setattr(claims["claims"], "call", lambda command: compare(command).returncode)
        return claims["claims"].guarded()

    return start


def test_a_claim_is_a_comparison_and_a_page(started, tmp_path, capsys):
    compare = FakeCompare(leave_out=("matt_12",))
    assert started(compare) == 0
    [command] = compare.commands
    assert command[command.index("--exp") + 1] == str(tmp_path / "trainings/post")
    assert command[command.index("--seeds") + 1] == "2" and "--demo" in command and command[-2:] == ["--clip-norm", "1"]
    assert command[command.index("--updates", command.index("--exp")) + 1] == "4"  # after the scale's own
    record = json.loads((tmp_path / "one-sided/claim.json").read_text())
    verdicts = {entry["text"]: entry["verdict"] for entry in record["statements"]}
    assert verdicts["ds_12 learns to translate"] == "yes (one seed)"
    assert verdicts["base_12 does not learn to translate"] == "no"
    assert verdicts["matt_12 does not learn to translate"] == "open"
    assert verdicts["matt_ds_12 is better than ds_12"] == "not clear"
    page = (tmp_path / "one-sided/claim.md").read_text()
    assert page in capsys.readouterr().out and "| not trained: matt_12" not in page and "(not trained: matt_12)" in page


@pytest.mark.parametrize("status, pages", [(3, 2), (1, 0), (2, 0), (130, 0)])
def test_failed_trainings_are_told_and_a_stop_is_a_stop(status, pages, started, tmp_path):
    """3: some trainings failed, and the others are judged; else nothing more is begun."""
    compare = FakeCompare(returncode=status)
    assert started(compare, names=("one-sided", "dlcl-ablations")) == status
    assert len(list(tmp_path.glob("*/claim.md"))) == pages and len(compare.commands) == max(1, pages)


def test_what_cannot_be_measured_leaves_the_page(started, claims, tmp_path, capsys, monkeypatch):
    def measure(*_):
        raise UserError("the disk\nis full")

    monkeypatch.setattr(claims["fit"], "measure", measure)
    monkeypatch.setattr(claims["speed"], "measure", lambda *_: {})
    assert started(FakeCompare(), names=("generalisation", "one-sided")) == 3
    assert len(list(tmp_path.glob("*/claim.md"))) == 2
    assert capsys.readouterr().err == "error: generalisation: not all was measured: the disk is full\n"


def test_signals_reach_what_trains(claims):
    """And the command ends as that does."""
    body = "trap 'exit 7' TERM; kill -TERM $PPID; sleep 5 & wait"
    assert claims["claims"].call(["bash", "-c", body]) == 7


def test_signals_that_come_before_its_start_reach_it(claims, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    popen = subprocess.Popen

    def slow(command):
        os.kill(os.getpid(), signal.SIGTERM)
        child = popen(command, stdout=subprocess.PIPE)
        child.stdout.readline()
        return child

    monkeypatch.setattr(claims["claims"].subprocess, "Popen", slow)
    assert claims["claims"].call(["bash", "-c", "trap 'exit 7' TERM; echo; sleep 5 & wait"]) == 7
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_plan_judges_nothing(started, tmp_path):
    assert started(FakeCompare(), "--dry-run", "true") == 0
    assert not (tmp_path / "one-sided/claim.md").exists()
