"""``compare --tune lr`` and ``--depths``: the search for learning rates, and the statistics of depth."""

import json
import math
import re
import subprocess
from types import SimpleNamespace

import pytest

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.compare import depth, picture, tune
from fairseq_deep.recipes.compare.results import diverged
from fairseq_deep.recipes.compare.systems import System
from fairseq_deep.tools.results import over_seeds, read
from tests.helpers import recipes
from tests.helpers.paths import ROOT

# a training whose loss has its least at 0.004 with one encoder layer and at 0.001 with two
TRAIN = r"""
if [[ ${0##*/} == fairseq-train ]]; then
  for word; do
    [[ $previous == --lr ]] && rate=$word
    [[ $previous == --encoder-layers ]] && layers=$word
    previous=$word
  done
  loss=$(awk -v rate="$rate" -v best="$([[ $layers == 1 ]] && echo 0.004 || echo 0.001)" \
    'BEGIN { steps = log(rate / best) / log(2); print 5 + (steps < 0 ? -steps : steps) }')
  [[ ! -e $CALLS.broken ]] || { cat "$CALLS.broken"; exit 1; }
  echo '| INFO | num. shared model params: 1,234 (num. trained: 1,234)'
  echo '| INFO | valid | {"epoch": 1, "valid_loss": "'"$loss"'", "valid_ppl": "32", "valid_num_updates": "4"}'
fi
"""


@pytest.mark.parametrize("loss, given, tried, remark", [
    *((lambda rate, best=best: abs(math.log(rate / best)), [], tried, f" {rate} of ") for best, tried, rate in (
        (0.0003, [0.000125, 0.00025, 0.0005, 0.001, 0.002, 0.004], 0.00025), (0.002, [0.001, 0.002, 0.004], 0.002),
        (0.009, [0.001, 0.002, 0.004, 0.008, 0.016], 0.008))),
    (lambda rate: -rate, ["--lr", "0.1"], [0.05, 0.1, 0.2, 0.4, 0.8, 1.6],
     "; 1.6 is at the edge of the grid: start a new search from --lr 3.2"),
    (lambda rate: rate, ["--lr", "0.1"], [0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2],
     "; 0.00625 is at the edge of the grid: start a new search from --lr 0.003125"),
    (lambda rate: math.inf if rate > 0.0006 else 4.0, [], [0.00025, 0.0005, 0.001, 0.002, 0.004], " 0.0005 of "),
    (lambda rate: math.inf, [], [0.0005, 0.001, 0.002, 0.004],
     "a diverges with all learning rates (0.0005, 0.001, 0.002, 0.004): give"),
])  # fmt: skip
def test_the_grid_grows_at_its_edges_until_the_best_is_inside(loss, given, tried, remark):
    """It starts at the system's own rate, and has an end."""
    args = SimpleNamespace(exp="exp", tune_seed=9, tune_updates=5, tune_schedule=[], scales=(1, 1), translate=True)
    made, found = tune.Tuner(args, None, 0.002), []

    def measure(candidates, train):
        rates = [float(each.label.removeprefix("a-lr")) for each in candidates]
        assert [each.flags for each in candidates] == [["--x", "1", "--lr", f"{rate:g}"] for rate in rates]
        found.extend(rates)
        return list(map(loss, rates))

    made.measure = measure
    try:
        [system] = made.choose([System("a", "arch", [*given, "--x", "1"])])
        said = tune.describe(system)
        assert list(system.tuned) == tried and system.flags[:-1] == ["--x", "1", "--lr"]
    except UsageError as error:
        said = error.message
    assert sorted(found) == tried and remark in said


@pytest.fixture
def tools_of_training(tools, stubs):
    recipes.write_program(tools / "fairseq-train", f"{TRAIN}\n{recipes.STUB}")
    return tools


TUNED = ("--translate", "false", "--updates", "8", "--tune", "lr")


def test_one_command_tunes_trains_and_judges(tools_of_training, compare, stubs, tmp_path):
    """Two depths, two final seeds: the search uses its own seed and half of the updates, and is not repeated."""
    exp = tmp_path / "exp"
    given = (*TUNED, "--tune-updates", "4", "--depths", "2,1", "--seeds", "2", "plain=prenorm_6l --warmup-updates 6")
    done = compare(*given)
    assert done.returncode == 0, done.stderr + done.stdout
    pattern = r"(?m)^fairseq-train .*/exp/(\S+)/checkpoints .*--max-update (\d+) .*--warmup-updates (\d+) .*--lr (\S+)$"
    found = re.findall(pattern, stubs.read_text())
    grid = [(n, rate) for n in (1, 2) for rate in ("0.0005", "0.001", "0.002")]
    grid += [(1, "0.004"), (1, "0.008")]
    searched = [(f"tune/runs/plain_{n}-lr{rate}/seed1000", "4", "3", rate) for n, rate in grid]
    final = [(f"runs/plain_{n}/seed{seed}", "8", "6", rate)
             for seed in (1, 2) for n, rate in ((1, "0.004"), (2, "0.001"))]  # fmt: skip
    assert found == searched + final
    table = (exp / "table.md").read_text()
    assert "plain_1: transformer_prenorm_6l --warmup-updates 6 --encoder-layers 1 --lr 0.004" in table
    tried = "0.0005 (8.000), 0.001 (7.000), 0.002 (6.000), 0.004 (5.000), 0.008 (6.000)"
    assert f"plain_1: learning rates (valid loss) {tried}" in table
    judgement = (exp / "depth.md").read_text()
    assert "| plain" in judgement and "4 updates, fewer than the runs" in judgement and len(read(str(exp))) == 4
    [judged] = json.loads((exp / "depth.json").read_text())
    assert judged["gain"] == {"1": 0.0, "2": 0.0} and judged["pays"] == "not clear" and "depth pays" in done.stdout
    recipes.assert_refused(compare(*given[:-1], "plain=prenorm_6l"), "plain_1-lr0.0005 was 'transformer_prenorm_6l ")
    assert "2 systems x 3 rates or more, 4 updates each, seed 1000" in compare("--dry-run", *given).stdout
    stubs.write_text("")
    for more in ((), ("--table-only",)):
        again = compare(*more, *given)
        assert again.returncode == 0 and "fairseq-train" not in stubs.read_text(), again.stderr
        assert (exp / "table.md").read_text() == table


def test_a_closed_pipe_is_no_traceback(tools):
    recipes.fork_drivers(tools)
    words = ["bash", "-c", f"{ROOT}/examples/compare/run.sh --demo --dry-run prenorm_6l | :; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_that_failed_for_another_reason_ends_the_search(tools_of_training, compare, stubs):
    """A full disk says nothing about a learning rate; a loss that is no number does."""
    broken = stubs.with_name(f"{stubs.name}.broken")
    for reason, status, said in (
        ("OSError: no space left on device\n", 4, "3 of 3 runs of the search for learning rates failed: "),
        ("FloatingPointError: gradients are Nan/Inf\n", 2, "diverges with all learning rates"),
    ):
        broken.write_text(reason)
        recipes.assert_refused(compare(*TUNED, "prenorm_2l2l_tiny"), said, status=status)
    broken.unlink()
    assert compare(*TUNED, "prenorm_2l2l_tiny").returncode == 0


@pytest.mark.parametrize("reason, lost", [
    ("FloatingPointError: gradients are Nan/Inf", True), ("Minimum loss scale reached (0.0001)", True),
    ("diverged in update 7: the loss scale fell to its minimum; first the loss", True),
    ("update 7: gradients are inconsistent between workers", False), ("exit status 137", False),
    ("No space left on device: '/home/nan/exp/checkpoint.pt'", False),
])  # fmt: skip
def test_divergence_is_told_from_a_failed_machine(reason, lost):
    assert diverged(reason) == lost


RATES = {"0.001": 6.0, "0.002": 5.0, "0.004": 5.5}


def row(line, layers, losses, bleu=None):
    seeds = {
        seed: {"valid_ppl": math.exp(loss), **({} if bleu is None else {"bleu": bleu})}
        for seed, loss in enumerate(losses, 1)
    }
    return {"line": line, "depth": layers, "done": list(seeds), "failed": {}, "seeds": seeds, "tuned": RATES}


def test_gains_are_the_deepest_minus_the_shallowest():
    """Losses are exact where perplexities are rounded."""
    rows = [row("a", n, [3 - 0.1 * math.log2(n) + seed / 100 for seed in range(5)], bleu=n) for n in (24, 6, 12)]
    [found] = depth.judge(rows, 1)
    assert found["depths"] == [6, 12, 24] and found["bleu"] == 18
    assert [*found["gain"].values()] == pytest.approx([0.2] * 5)
    for each, nll in zip(rows, (0.452, 0.457, 0.457)):  # in bits: both print as a perplexity of 1.37
        for figures in each["seeds"].values():
            figures["valid_nll"] = nll
    assert [*depth.judge(rows, 1)[0]["gain"].values()] == pytest.approx([0.005 * math.log(2)] * 5)


GAINS = (0.05, 0.06, 0.05, 0.06, 0.055)
UNTUNED = "Learning rates are not tuned, or at an edge of their grid: a."


@pytest.mark.parametrize("gains, bleu, how, verdict, remark", [
    (GAINS, 1.0, {}, "yes", ""),
    (GAINS, -1.0, {}, "not clear", ""),  # better in loss only
    (GAINS, None, {}, "not clear", ""),
    (GAINS[:4], 1.0, {}, "not clear", ""),
    ((0.010, 0.012, 0.011, 0.010, 0.012), 1.0, {}, "not clear", ""),  # significant, and below the margin
    ((0.3, -0.3, 0.2, -0.1, 0.1), 1.0, {}, "not clear", ""),
    ([-gain for gain in GAINS], 1.0, {}, "no", ""),
    (GAINS, 1.0, {"tuned": {}}, "not clear", UNTUNED),
    (GAINS, 1.0, {"tuned": {"0.001": 6.0, "0.002": 5.0}}, "not clear", UNTUNED),  # at the edge
    (GAINS, 1.0, {"failed": {6: "loss is NaN"}}, "not clear", "Runs failed, and the others are a selection: a with 24"),
])  # fmt: skip
def test_depth_pays_if_the_deepest_is_better_by_the_margin_and_significantly(gains, bleu, how, verdict, remark):
    deep = row("a", 24, [3.0 - gain for gain in gains], bleu and 20.0 + bleu)
    [found] = depth.judge([row("a", 6, [3.0] * len(gains), 20.0), {**deep, **how}], 1)
    page = depth.page([found], ["b"], 400)
    assert found["pays"] == verdict and f" {verdict} |" in page.splitlines()[2] and remark in page
    assert [UNTUNED in page, "Runs failed" in page] == ["tuned" in how, "failed" in how]
    assert "A depth without a finished run: b." in page and "The search for learning rates had 400 updates" in page


def test_systems_with_an_unfinished_depth_are_named_but_not_judged(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(picture, "draw_depths", lambda rows, path: drawn.extend(rows))
    rows = [row("a", 6, [3.0] * 5, 20.0), row("b", 6, [3.0] * 5), row("b", 24, []), row("a", 24, [2.9] * 5, 21.0)]
    depth.report(str(tmp_path), rows[1:3], None)
    assert not [*tmp_path.iterdir()], "nothing to judge"
    depth.report(str(tmp_path), rows, None)
    [judged] = json.loads((tmp_path / "depth.json").read_text())
    assert judged["line"] == "a" and drawn == [rows[0], rows[3]]
    text = (tmp_path / "depth.md").read_text()
    assert text.endswith("A depth without a finished run: b.\n") and text in capsys.readouterr().out


def test_tests_over_seeds_are_students():
    """With two degrees of freedom p = 1 - t / sqrt(t^2 + 2): t is sqrt(12) from 0, and 3 sqrt(3) from the margin."""
    expected = {"half": 4.302653 * 0.1 / 3**0.5, "p": 1 - (12 / 14) ** 0.5, "p_equal": (1 - (27 / 29) ** 0.5) / 2}
    assert over_seeds([0.1, 0.2, 0.3], 0.5) == pytest.approx({**expected, "margin": 0.5}, rel=1e-6)
    assert over_seeds([-0.1, -0.2, -0.3], 0.5) == pytest.approx(over_seeds([0.1, 0.2, 0.3], 0.5))
    assert over_seeds([0.3] * 3, 0.5) == {"half": 0, "p": 0, "p_equal": 0, "margin": 0.5}, "without a spread"
    assert over_seeds([0.0] * 3, 0.0) == {"half": 0, "p": 1, "p_equal": 1, "margin": 0}
    assert over_seeds([0.1, 0.2]) == over_seeds([0.1, 0.2, math.nan]) == {}


def test_holm():
    """The example of Holm's step-down method: 0.01, 0.02, 0.03, 0.04 become 0.04, 0.06, 0.06, 0.06."""
    assert depth.holm([0.04, 0.01, None, 0.03, 0.02], 4) == pytest.approx([0.06, 0.04, None, 0.06, 0.06], nan_ok=True)
    assert depth.holm([0.6, 0.9], 2) == [1.0, 1.0] and depth.holm([], 0) == []


def test_systems_that_are_not_finished_count_in_the_correction():
    """Otherwise a verdict would depend on the order in which systems finish."""
    gains = (0.06, 0.01, 0.05, 0.02, 0.04)
    rows = [row("a", 6, [3.0] * 5, 20.0), row("a", 24, [3.0 - gain for gain in gains], 21.0)]
    alone, among = (depth.judge(rows, planned)[0] for planned in (1, 5))
    assert among["p"] == pytest.approx(5 * alone["p"]) and alone["pays"] == "yes"
    assert among["pays"] == "not clear"
