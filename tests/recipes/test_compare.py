"""``examples/compare/run.sh``: systems on tiny data under equal conditions, in one table and one picture."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fairseq_deep.recipes import changes, driver
from fairseq_deep.recipes.compare import options
from fairseq_deep.recipes.record import write_json
from fairseq_deep.tools.results import by_system, read
from tests.helpers import recipes
from tests.helpers.forkserver import stand_in
from tests.helpers.paths import ROOT

SCRIPT = ROOT / "examples/compare/run.sh"
WIDTH = 16
# what fairseq-train says of a training
SAID = r"""
    echo '| INFO | num. shared model params: 1,234 (num. trained: 1,234)'
    echo '| INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "9", "ppl": "512", "wps": "1000", "wpb": "100",' \
      '"num_updates": "2", "ratio_enc": "0.5", "ratio_dec": "0.25"}'
    echo '| INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_ppl": "362", "valid_num_updates": "4"}'
"""
STUB = recipes.STUB.replace("    [[ ! -e $CALLS.hang ]]", f"{SAID}    [[ ! -e $CALLS.hang ]]")


def words(corpus, exp, *more, flags=()):
    fixed = ["--data", corpus, "--exp", exp, "--ngpu", "0", "--workers", "1", "--width", WIDTH, "--updates", "4"]
    return [str(word) for word in (SCRIPT, *fixed, *more, *(("--", *flags) if flags else ()))]


def compare(tools, *given, **how):
    """The ended command, in this process."""
    return recipes.driven(*words(*given, **how), variables=recipes.environment(tools))


@pytest.fixture
def stubs(stubs, tools):
    """Those of the recipe; nor is this machine looked at, which takes seconds."""
    recipes.write_program(tools / "fairseq-train", STUB)
    make_real(tools, "fairseq-deep", "[[ $1 == diagnose ]]")
    return stubs


def make_real(tools, name, condition="true"):
    """Let *name* be the real program where *condition* holds; its calls are recorded all the same."""
    call = f'echo "{name} $*" >>"$CALLS"; {stand_in(name)}'
    recipes.write_program(tools / name, f"if {condition}; then {call}; fi\n{STUB}")


def make_slow(tools):
    """Let fairseq-train save a checkpoint and then hang, while a file says so."""
    path = tools / "fairseq-train"
    hang = f'({stand_in("fairseq-train")} --max-update 2) && echo $$ >"$CALLS.hanging" && exec sleep 300'
    recipes.write_program(path, f"if [[ -e $CALLS.pause ]]; then {{ {hang}; }}; exit; fi\n{path.read_text()}")


def trained(calls):
    """Label and seed of the trainings since the last question, sorted; clears the list of calls."""
    found = re.findall(r"^fairseq-train .*/runs/(\S+)/checkpoints ", calls.read_text(), re.MULTILINE)
    calls.write_text("")
    return sorted(found)


def expected_parameters(vocabulary):
    """Counts by hand for one layer in each stack: stock layers with biases, and the depth-wise LSTM's without."""
    d, ffn = WIDTH, 4 * WIDTH
    attention, hidden, gates = 4 * d * d + 2 * d, 10 * d * d + 8 * d, 2 * (6 * d * d + 6 * d)
    stock = 3 * (4 * (d * d + d) + 2 * d) + 2 * (2 * d * ffn + ffn + d + 2 * d) + 2 * 2 * d
    return [vocabulary * d + count for count in (stock, 3 * attention + 2 * hidden + gates)]


def test_two_systems_with_two_seeds_killed_on_the_way(tools, stubs, corpus, tmp_path):
    """Three real trainings, one real decoding: a checkpoint is gone on from, and nothing is done twice."""
    exp, pause = tmp_path / "comparison with blanks", Path(f"{stubs}.pause")
    make_real(tools, "fairseq-preprocess")
    make_real(tools, "fairseq-train", "[[ $* != */lstm/seed2/* ]]")
    make_slow(tools)
    make_real(tools, "fairseq-generate", "[[ $* == */lstm/seed1/* ]]")
    one = "--encoder-layers 1 --decoder-layers 1"
    given = (corpus, exp, "--seeds", "1,2", f"plain=prenorm_6l {one}", f"lstm=lstm_6l {one}")
    flags = ["--batch-size", "50"]
    pause.touch()
    child, pid = recipes.begun(words(*given, flags=flags), tools, stubs)
    child.kill()
    child.wait()
    pause.unlink()
    done = compare(tools, *given, "--jobs", "2", flags=flags)  # at once: it waits for the end of the training
    assert done.returncode == 0, done.stderr + done.stdout
    recipes.assert_gone(pid, 0.1)
    assert trained(stubs) == ["lstm/seed1", "lstm/seed2", "plain/seed1", "plain/seed2"]
    assert done.stdout.count(": diagnose failed, ") == done.stdout.count("\nlstm seed 2: diagnose failed, ") == 1
    assert "plain seed 1: started (resumed)" in done.stdout and "4 of 4 runs left" in done.stdout
    assert "Loaded checkpoint" in (exp / "runs/plain/seed1/logs/4-train.log").read_text()

    record = json.loads((exp / "table.json").read_text())
    plain, lstm = record["systems"]
    trained_on = json.loads((exp / "runs/lstm/seed2/RESULT.json").read_text())["commit"]
    vocabulary = len((exp / "shared/data-bin/dict.de.txt").read_text().splitlines()) + 4
    assert [plain["parameters"], lstm["parameters"]] == expected_parameters(vocabulary)
    assert plain["done"] == lstm["done"] == [1, 2] and record["updates"] == "4"
    assert list(plain["curve"]["1"]) == ["1", "2", "3", "4"] and plain["curve"]["1"] != plain["curve"]["2"]
    for row in (plain, lstm):
        assert row["valid_loss"]["min"] < row["valid_loss"]["max"] and row["bleu"]["mean"] == 12.34
        assert all(row[name]["mean"] > 0 for name in ("step_seconds", "ratio_encoder", "ratio_decoder"))
    for row in (plain, lstm):  # measured on the checkpoint, by diagnose
        assert abs(row["seeds"]["1"]["source_gain"]) < 1 and 0 < row["seeds"]["1"]["between_encoder"] < 1
        equal = row["seeds"]["1"]["equal_time"]  # None where the other was done before the first validation
        assert equal is None or equal >= row["valid_loss"]["min"]
    assert "source_gain" not in lstm["seeds"]["2"], "its checkpoint is none"
    assert lstm["seeds"]["1"]["tokens_per_second"] > 0 and plain["tokens_per_second"] is None
    stored = by_system(read(str(exp)))
    assert {name: sorted(runs) for name, runs in stored.items()} == {"plain": [1, 2], "lstm": [1, 2]}
    run = stored["lstm"][2]
    assert run["folder"] == "runs/lstm/seed2" and run["valid_loss"] == lstm["seeds"]["2"]["valid_loss"]
    assert run["flags"]["--encoder-layers"] == "1" and run["environment"]["torch"] and run["commit"] == trained_on
    table = (exp / "table.md").read_text()
    assert table in done.stdout and [line.split()[1] for line in table.splitlines()[:4]][2:] == ["plain", "lstm"]
    assert [path.name for path in (exp / "runs/lstm/seed2/checkpoints").iterdir()] == ["checkpoint_last.pt"]
    trained_by = json.loads((exp / "runs/plain/seed1/train.jsonl").read_text().splitlines()[0])["commit"]
    assert json.loads((exp / "runs/plain/seed1/RESULT.json").read_text())["commit"] == trained_by

    again = compare(tools, *given, flags=flags)
    assert again.returncode == 0, again.stderr
    assert (exp / "table.md").read_text() == table
    assert recipes.programs(stubs) == []


def test_without_translations_the_losses_are_compared(tools, stubs, corpus, tmp_path):
    exp, tables = tmp_path / "exp", tmp_path / "tables"
    done = compare(tools, corpus, exp, "--translate", "false", "--tables", tables, "prenorm_6l", "lstm_6l")
    assert done.returncode == 0, done.stderr
    assert trained(stubs) == ["lstm_6l/seed1", "prenorm_6l/seed1"] and "valid ppl 362" in done.stdout
    head = (tables / "table.md").read_text().splitlines()[0]
    assert "valid loss" in head and "BLEU" not in head and "difference" not in head
    assert (tables / "picture.png").exists() and not (exp / "table.md").exists() and head not in done.stdout
    assert not list(exp.glob("runs/*/seed1/generate-*"))
    again = compare(tools, corpus, exp, "--tables", tables, "prenorm_6l", "lstm_6l")  # now with translations
    assert again.returncode == 0, again.stderr
    assert trained(stubs) == [] and "BLEU" in (tables / "table.md").read_text().splitlines()[0]


@pytest.fixture
def ask(tools, corpus, tmp_path):
    """A function that returns the ended command for systems, by default of a dry run in ``tmp_path/exp``."""

    def ask(*systems, recipe=(), flags=(), **options):
        values = {"conf": "mini", "seeds": "1", "updates": "4", "width": WIDTH, "heads": "2", "ngpu": "0",
                  "dry_run": "true", "exp": tmp_path / "exp", "data": corpus, **options}  # fmt: skip
        given = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", value)]
        tail = ["--", *flags] if flags else []
        return recipes.driven(SCRIPT, *given, *recipe, *systems, *tail, variables=recipes.environment(tools))

    return ask


def test_a_directory_that_cannot_be_made_is_one_line(ask, tmp_path):
    (tmp_path / "file").touch()
    done = ask("lstm_6l", exp=tmp_path / "file/exp", dry_run="false")
    recipes.assert_refused(
        done, f"cannot write to {tmp_path}/file/exp (Not a directory): choose another --exp", status=2
    )


def test_the_search_scales_a_systems_own_schedule():
    words = ["--warmup-updates", "9", "--lr", "1", "--cooldown-updates", "1"]
    assert changes.scaled(words, 1 / 3) == ["--warmup-updates", "3", "--cooldown-updates", "1"]
    assert changes.scaled(words, 1) == changes.scaled(["--warmup-updates", "0"], 0.5) == []


SCHEDULE = ["--lr-scheduler", "inverse_sqrt_cooldown", "--warmup-updates", "1"]


def test_changed_conditions_are_refused_and_more_updates_taken(ask, tmp_path):
    exp = tmp_path / "exp"

    def refuse(*parts, system="a=lstm_6l", **how):
        recipes.assert_refused(ask(system, **how), *parts)

    words = f"--conf mini --average 1 --updates 4 --width {WIDTH} --heads 2".split()
    args = driver.read_options("compare", words, options.Compare())
    args.scales = [4 / 2000, 1]
    text = {"the hash of the text": "none"}

    def begin():
        write_json(str(exp / "conditions.json"), {**options.conditions(args), **text})

    (exp / "runs/a").mkdir(parents=True)
    begin()
    text["the hash of the text"] = re.search(r"the hash of the text: none, now (\w+):", ask("a=lstm_6l").stderr)[1]
    begin()
    write_json(str(exp / "runs/a/system.json"), {"system": "transformer_lstm_6l"})
    for updates in ("4", "8"):
        assert "--warmup-updates 1 " in ask("a=lstm_6l", updates=updates).stdout, "as it was begun"
    refuse("another value of --updates: 4, now 3", "another --exp", updates="3")
    refuse("another value of --beam: the default, now 2", recipe=["--beam", "2"])
    refuse("another value of --width: 16, now 32", width="32")
    refuse("the flags after the lone --: the default, now --dropout 0.2", flags=["--dropout", "0.2"])
    refuse("a was 'transformer_lstm_6l'", "now it is 'transformer_rnn_6l'", system="a=rnn_6l")
    assert ask("a=lstm_6l").returncode == ask("a=lstm_6l", updates="800").returncode == 0
    assert ask("b=lstm_6l --ddp-backend legacy_ddp --num-workers 0").returncode == 0, "both train the same model"
    # the rates of this schedule depend on the number of updates
    args.extra = SCHEDULE
    begin()
    assert ask("a=lstm_6l", flags=args.extra).returncode == 0
    refuse("another value of --updates: 4, now 8", "another --exp", flags=args.extra, updates="8")
    args.extra = []
    begin()
    own = f"b=lstm_6l {shlex.join(SCHEDULE)}"
    refuse("another value of --updates: 4, now 8", "another --exp", system=own, updates="8")


def test_a_failed_system_is_marked_and_made_up_for(ask, tools, stubs, tmp_path):
    recipes.write_program(tools / "fairseq-train", STUB.replace("-e $CALLS.fail", "-e $CALLS.fail || $* != *rnn_6l*"))
    Path(f"{stubs}.fail").touch()
    listed = tmp_path / "systems.txt"
    listed.write_text("# depth-wise\n\nrnn_6l\nlstm_6l\n")
    done = ask(systems=listed, dry_run="false")
    assert "rnn_6l seed 1: FAILED: stage 4 (train) failed: ValueError: planted\n" in done.stdout
    last = "error: 1 of 2 runs failed: rnn_6l seed 1; the same command retries them\n"
    assert (done.returncode, done.stderr) == (3, last)
    table = (tmp_path / "exp/table.md").read_text()
    assert "| 0 of 1 (1 FAILED) |" in table and "FAILED: rnn_6l, seed 1: stage 4 (train) failed" in table
    assert trained(stubs) == ["lstm_6l/seed1", "rnn_6l/seed1"]
    alone = ask("rnn_6l", dry_run="false")
    assert alone.returncode == 3 and alone.stderr.startswith("error: 1 of 1 runs failed: rnn_6l seed 1;")
    assert "| 0 of 1 (1 FAILED) |" in (tmp_path / "exp/table.md").read_text(), "a table of failures alone"
    trained(stubs)
    Path(f"{stubs}.fail").unlink()
    done = ask(systems=listed, dry_run="false")
    assert (done.returncode, done.stderr) == (0, "")
    assert trained(stubs) == ["rnn_6l/seed1"] and "FAILED" not in (tmp_path / "exp/table.md").read_text()


def test_other_data_are_refused_before_the_text_is_touched(ask, stubs, corpus, tmp_path):
    assert ask("lstm_6l", dry_run="false").returncode == 0
    text = tmp_path / "exp/shared/text/raw/valid.de"
    before = text.read_text()
    recipes.write_pairs(corpus, valid=[("new", "neu")] * 3)
    for system in ("lstm_6l", "rnn_6l"):  # one that is not there yet must not have them, either
        done = ask(system, dry_run="false")
        recipes.assert_refused(done, "exp was begun with another value of the hash of the text: ")
    assert text.read_text() == before and not (tmp_path / "exp/runs/rnn_6l").exists()
