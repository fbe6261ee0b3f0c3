"""``examples/claims``: how statements are judged."""

import math

import pytest

from tests.helpers.claims import record, scored


@pytest.mark.parametrize(
    "left, right, chances, verdict",
    [
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.02), "yes (two seeds)"),
        ((12.0,), (11.0,), (0.01,), "yes (one seed)"),
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.03), "not clear"),
        ((12.0, 13.0), (11.0, 11.5), (0.01, 0.20), "not clear"),
        ((12.0, 11.0), (11.0, 11.5), (0.01, 0.01), "not clear"),
        ((10.0, 10.0), (11.0, 11.5), (0.01, 0.01), "no (two seeds)"),
        ((12.0, 12.1, 12.2), (11.0, 11.1, 11.2), (0.3, 0.3, 0.3), "yes"),  # each seed by the same: certain over seeds
        ((12.0, 13.0, 14.5), (11.0, 11.5, 11.6), (0.01, 0.01, 0.01), "not clear"),  # p 0.06: seeds differ by as much
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
    if verdict == "yes (two seeds)":
        assert found["found"] == "+1.25 BLEU [+1.00, +1.50], p 0.010 0.020"


@pytest.mark.parametrize("left, chances, verdict", [
    ((11.2, 11.1), (0.5, 0.5), "yes (two seeds)"), ((10.8, 10.9), (0.3, 0.3), "yes (two seeds)"),
    ((10.4, 10.3), (0.01, 0.01), "no (two seeds)"),
    ((9.0, 9.0), (0.3, 0.01), "not clear"), ((11.0,), (1.0,), "yes (one seed)"), ((9.0,), (0.01,), "no (one seed)"),
    ((10.9, 11.0, 11.1), (0.5, 0.5, 0.5), "yes"), ((9.3, 13.7, 10.4), (0.5, 0.5, 0.5), "not clear"),
    ((10.8, 10.9), (0.01, 0.01), "yes (two seeds)"),  # a small difference stays small, however exactly measured
])  # fmt: skip
def test_as_good(left, chances, verdict, claims, monkeypatch):
    def bootstrap(rows, resamples):
        for seed in rows[0]["done"]:
            rows[1]["seeds"][seed]["p"] = chances[seed - 1]

    monkeypatch.setattr(claims["judge"], "bootstrap", bootstrap)
    statement = claims["definitions"].Statement("as good", "a", "b")
    found = claims["judge"].judge(statement, [scored("a", *left), scored("b", *[11.0] * 3)], {}, {}, 1000)
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
    assert [verdict["verdict"] for verdict in verdicts] == ["yes (one seed)", "no (one seed)"]
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
    ("trains", (0.5, 0.2, 0.3), "yes"), ("trains", (0.5, 0.05), "not clear"), ("trains", (0.0, 0.05), "no (two seeds)"),
    ("fails", (0.0, 0.05), "yes (two seeds)"), ("fails", (0.5, 0.05), "not clear"), ("fails", (0.5, 0.2, 0.3), "no"),
    ("trains", (), "open"), ("trains", (0.5,), "yes (one seed)"), ("fails", (0.0,), "yes (one seed)"),
])  # fmt: skip
def test_training_is_to_use_the_source(kind, gains, verdict, claims):
    own = record("a", **{f"s{seed}": {"source_gain": gain} for seed, gain in enumerate(gains, 1)})
    statement = claims["definitions"].Statement(kind, "a")
    assert claims["judge"].judge(statement, [own], {}, {}, 1000)["verdict"] == verdict


def test_a_model_that_does_not_translate_has_not_learned(claims):
    """DS-Init in the encoder only: the loss depends on the source, and the output does not."""
    own = record("a", s1={"source_gain": 1.51, "bleu": 0.01})
    trains, fails = (
        claims["judge"].judge(claims["definitions"].Statement(kind, "a"), [own], {}, {}, 1000)
        for kind in ("trains", "fails")
    )
    assert (trains["verdict"], fails["verdict"]) == ("no (one seed)", "yes (one seed)")
    assert trains["found"] == "source gain 1.51 (0.01 BLEU)"


@pytest.mark.parametrize("end, verdict", [(5.5, "no (one seed)"), (13.9, "yes (one seed)")])
def test_a_model_that_has_lost_what_it_had_learned_fails(end, verdict, claims):
    """Outputs that are the same everywhere can have any loss, and any difference between two sources."""
    own = {**record("a", s1={"source_gain": 0.18}), "curve": {"1": {"100": 9.0, "200": 5.2, "300": end}}}
    found = claims["judge"].judge(claims["definitions"].Statement("fails", "a"), [own], {}, {}, 1000)
    assert found["verdict"] == verdict and ("at the end 13.90" in found["found"]) is (end > 6)


@pytest.mark.parametrize("reason, fails, trains", [
    ("FloatingPointError: gradients are Nan/Inf", "yes (two seeds)", "not clear"),
    ("FloatingPointError: Minimum loss scale reached (0.0001)", "yes (two seeds)", "not clear"),
    ("diverged in update 7: the loss scale fell to its minimum; first the loss", "yes (two seeds)", "not clear"),
    ("update 7: gradients are inconsistent between workers", "open", "yes (one seed)"),
    ("exit status 137", "open", "yes (one seed)"), ("no space left on device", "open", "yes (one seed)"),
    ("No space left on device: '/home/nan/exp/checkpoint.pt'", "open", "yes (one seed)"),
])  # fmt: skip
def test_a_loss_that_is_no_number_counts_as_failed_and_a_crash_of_the_machine_does_not(reason, fails, trains, claims):
    judge, Statement = claims["judge"], claims["definitions"].Statement
    broken = {**record("a"), "failed": {1: reason, 2: reason}, "wanted": [1, 2]}
    assert judge.judge(Statement("fails", "a"), [broken], {}, {}, 1000)["verdict"] == fails
    half = {**record("a", s1={"source_gain": 0.5}), "failed": {2: reason}, "wanted": [1, 2]}
    assert judge.judge(Statement("trains", "a"), [half], {}, {}, 1000)["verdict"] == trains


def test_the_reason_of_a_failure_fits_into_a_table(claims):
    broken = {**record("a"), "failed": {1: "words " * 100}, "wanted": [1]}
    why = claims["judge"].judge(claims["definitions"].Statement("trains", "a"), [broken], {}, {}, 1000)["why"]
    assert why.startswith("not trained: a; words words") and len(why) < 150


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
    assert [verdict["verdict"] for verdict in verdicts] == ["yes (one seed)", "no (one seed)"]
    assert verdicts[0]["text"] == "a is better than b in train ppl"
    for left, right, verdict in ((3.0, math.nan, "yes"), (math.nan, 3.0, "no"), (math.inf, 3.0, "no")):
        fitted = {"a": {"train_ppl": left}, "b": {"train_ppl": right}}
        assert claims["judge"].judge(fits[0], records, {}, fitted, 1000)["verdict"] == f"{verdict} (one seed)"


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


NAN, FULL = "FloatingPointError: gradients are Nan/Inf", "no space left on device"


@pytest.mark.parametrize("left, right, failed, higher, as_good, words", [
    ((12.0, 12.0), (), {1: NAN, 2: NAN}, "yes (two seeds)", "yes (two seeds)",
     "b diverged with seed 1; b diverged with seed 2"),
    ((12.0, 12.0), (11.0,), {2: NAN}, "yes (two seeds)", "yes (two seeds)",
     "+1.00 BLEU (1 of 2 seeds), p 0.010; b diverged with seed 2"),
    ((10.0, 12.0), (11.0,), {2: NAN}, "not clear", "not clear", "-1.00 BLEU (1 of 2 seeds), p 0.010; b diverged"),
    ((12.0,), (), {1: NAN}, "yes (one seed)", "yes (one seed)", "b diverged with seed 1"),
    ((12.1, 12.2, 12.0), (12.0, 12.0), {3: NAN}, "not clear", "yes",
     "+0.15 BLEU [+0.10, +0.20] (2 of 3 seeds), p 0.500"),
    ((12.0,), (), {1: FULL}, "open", "open", "-"),
])  # fmt: skip
def test_a_training_that_diverged_has_lost(left, right, failed, higher, as_good, words, claims, monkeypatch):
    """Z19's DS-Init in one stack fails so: what is left of its seeds must not be judged as if nothing had been."""
    judge, Statement = claims["judge"], claims["definitions"].Statement
    chance = 0.5 if len(left) == 3 else 0.01
    monkeypatch.setattr(
        judge, "bootstrap", lambda rows, _: [rows[1]["seeds"][s].update(p=chance) for s in rows[0]["done"]]
    )
    records = [{**scored(label, *scores), "wanted": list(range(1, len(left) + 1))} for label, scores in
               (("a", left), ("b", right))]  # fmt: skip
    records[1]["failed"] = failed
    found = judge.judge(Statement("higher", "a", "b"), records, {}, {}, 1000)
    assert found["verdict"] == higher and found["found"].startswith(words)
    assert judge.judge(Statement("as good", "a", "b"), records, {}, {}, 1000)["verdict"] == as_good
    back = judge.judge(Statement("higher", "b", "a"), records, {}, {}, 1000)["verdict"]
    assert back == higher.replace("yes", "no")
