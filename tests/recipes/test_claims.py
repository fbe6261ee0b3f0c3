"""``examples/claims``: what the claims ask for, what is refused, and what a claim leaves behind."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest

from fairseq_deep.tools import UsageError
from tests.helpers import recipes
from tests.helpers.claims import scored
from tests.helpers.paths import ROOT

FOLDER = ROOT / "examples/claims"


def run(tools, *words):
    recipes.fork_drivers(tools)
    environment = recipes.environment(tools)
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


def test_loss_at_equal_time(claims):
    """Where the slower system was when the faster one had done all of its updates."""
    records = [
        {"label": "fast", "done": [1], "curve": {"1": {"10": 6.0, "20": 5.0}}},
        {"label": "slow", "done": [1], "curve": {"1": {"10": 4.0, "20": 3.0}}},
    ]
    timed = {"fast": {"step_seconds": 1.0}, "slow": {"step_seconds": 4 / 3}}
    losses = claims["page"].losses_at_equal_time(records, timed)
    assert {label: loss["mean"] for label, loss in losses.items()} == {"fast": 5.0, "slow": pytest.approx(3.5)}


def test_list_names_every_claim(claims, tools):
    done = run(tools, "--list")
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
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    claims["claims"].check(claims["claims"].Claims().parse([*flags, *names]))


def test_what_cannot_work_is_refused_before_anything_starts(claims, tools, text, tmp_path):
    small = text(train=100)
    cases = [
        ((), {}, "no claim given"),
        (("dept",), {"data": small}, "unknown claim 'dept' (did you mean depth?): see --list"),
        (("depth",), {}, "--data is missing"),
        (("depth",), {"data": small}, "the train set of 100 pairs is too small for a verdict: give 5,000 or more"),
        (("depth",), {"demo": "true", "data": small}, "--data and --demo exclude each other"),
        (("depth",), {"demo": "true", "resamples": "10"}, "--resamples 10 is too few"),
    ]
    for names, options, message in cases:
        with pytest.raises(UsageError) as error:
            check(claims, *names, **options)
        assert message in str(error.value)
    exp = tmp_path / "exp"
    for words, message in (((), "no claim given"), (("depth", "--demo", "--rounds", "0"), "--rounds must be a whole")):
        done = run(tools, "--exp", exp, *words)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not exp.exists()


def test_too_few_test_sentences(claims, text):
    with pytest.raises(UsageError, match="the test set of 10 pairs is too small"):
        check(claims, "lstm", data=text(test=10))


def test_every_system_is_known_to_fairseq_train(claims, monkeypatch):
    """As compare sees it before it trains anything: flags parsed, and each model built without memory."""
    modules, definitions = importlib.import_module("fairseq_deep.recipes.compare.systems"), claims["definitions"]
    base = "fairseq-train DATA --arch transformer --task translation --share-all-embeddings --encoder-embed-dim 128"
    base += " --decoder-embed-dim 128 --encoder-attention-heads 4 --decoder-attention-heads 4"
    known = [system for claim in definitions.CLAIMS.values() for system in claim.systems]
    words = sorted({f"{system.label}={system.words.format(hidden=384)}" for system in known})
    systems = [modules.read_systems([word], "")[0] for word in words]
    modules.check(systems, base.split(), 128)
    assert len(systems) >= 45 and all(system.ours for system in systems)


def test_plan_of_a_claim(tools, text, tmp_path):
    done = run(tools, "--dry-run", "--exp", tmp_path / "exp", "--data", text(), "--ngpu", "0", "generalisation")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fairseq-train ") == 4 and not (tmp_path / "exp").exists()


@pytest.mark.parametrize("updates, extra, whole", [("30", [], ["3000"]), ("30", ["--warmup-updates", "5"], [])])
def test_a_shorter_claim_has_a_shorter_warm_up(claims, updates, extra, whole):
    driver = importlib.import_module("fairseq_deep.recipes.claims.driver")
    options = driver.Claims().parse(["--demo", "--exp", "x", "--updates", updates, "lstm", "--", *extra])
    command = driver.compare_command(options, "lstm")
    assert [after for word, after in zip(command, command[1:]) if word == "--full-updates"] == whole


def test_page_says_what_was_found(claims, tmp_path):
    definitions = claims["definitions"]
    claim = definitions.CLAIMS["generalisation"]
    spread = {"mean": 20.0, "min": 19.0, "max": 21.0, "std": 1.0}
    common = {"bleu": spread, "valid_loss": None, "command": "arch", "parameters": 1234, "curve": {}}
    common.update(wanted=[1, 2, 3], failed={3: "exit status 1"})
    records = [{**scored(system.label, 19.0, 21.0), "paper": system.paper, **common} for system in claim.systems]
    verdicts = [{"text": "a is better than b", "found": "+1.00 BLEU", "verdict": "no", "why": "because"}]
    fitted = {claim.systems[0].label: {"train_bleu": 1.5, "dev_bleu": 1.25, "train_ppl": 3.0, "dev_ppl": 4.0}}
    text = claims["page"].write(str(tmp_path), claim, records, verdicts, {"updates": "10"}, {}, fitted)
    assert (tmp_path / "claim.md").read_text() == text
    line = next(line for line in text.splitlines() if line.startswith("| base "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["base", claim.systems[0].paper, "2 of 3 (1 FAILED)", "1,234", "20.00 [19.00, 21.00]"]
    assert cells[5:] == ["1.50", "1.25", "3.00", "4.00"]
    assert "| no: because" in text and claim.sentence in text


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
        drawn = {"curve": {"1": {}}, "bleu": spread}
        rows = [
            {"system": label, "done": [1], "wanted": [1], "seeds": {"1": figures}, "failed": {}, **drawn}
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
        fixed = {"demo": "true", "seeds": "2", "updates": "4", "exp": str(tmp_path), "ngpu": "0", "workers": "1"}
        fixed.update({"resamples": "100", "rounds": "1"})
        line = [word for flag, value in fixed.items() for word in (f"--{flag}", value)]
        monkeypatch.setattr(claims["claims"], "call", lambda command: (compare(command).returncode, "", ""))
        return claims["claims"].main("run.sh", "run", [*line, *words, *names, "--", "--clip-norm", "1"])

    return start


def test_a_claim_is_a_comparison_and_a_page(started, tmp_path, capsys):
    compare = FakeCompare(leave_out=("matt_12",))
    assert started(compare) == 0
    [command] = compare.commands
    assert command[command.index("--exp") + 1] == str(tmp_path / "trainings/post")
    assert command[command.index("--seeds") + 1] == "2" and "--demo" in command and command[-2:] == ["--clip-norm", "1"]
    assert command.count("--updates") == 1 and command[command.index("--updates") + 1] == "4"  # not the scale's
    record = json.loads((tmp_path / "one-sided/claim.json").read_text())
    verdicts = {entry["text"]: entry["verdict"] for entry in record["statements"]}
    assert verdicts["ds_12 learns to use its source"] == "no (one seed)"  # with 0.5 BLEU
    assert verdicts["base_12 does not learn to use its source"] == "yes (one seed)"
    assert verdicts["matt_12 does not learn to use its source"] == "open"
    assert verdicts["matt_ds_12 is better than ds_12"] == "not clear"
    page = (tmp_path / "one-sided/claim.md").read_text()
    assert page in capsys.readouterr().out and "| open: not trained: matt_12 " in page


@pytest.mark.parametrize("status, pages", [(3, 2), (1, 0), (2, 0), (130, 0)])
def test_failed_trainings_are_told_and_a_stop_is_a_stop(status, pages, started, tmp_path):
    """3: some trainings failed, and the others are judged; else nothing more is begun."""
    compare = FakeCompare(returncode=status)
    assert started(compare, names=("one-sided", "dlcl-ablations")) == status
    assert len(list(tmp_path.glob("*/claim.md"))) == pages and len(compare.commands) == max(1, pages)


def test_what_cannot_be_measured_leaves_the_page(started, claims, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(claims["fit"], "measure", lambda *_: ({}, ["the disk\nis full"]))
    monkeypatch.setattr(claims["speed"], "measure", lambda *_: ({}, []))
    assert started(FakeCompare(), names=("generalisation", "one-sided")) == 3
    assert len(list(tmp_path.glob("*/claim.md"))) == 2
    assert capsys.readouterr().err == "error: generalisation: a measurement failed: the disk is full\n"


def test_a_plan_judges_nothing(started, tmp_path):
    assert started(FakeCompare(), "--dry-run") == 0
    assert not (tmp_path / "one-sided/claim.md").exists()
