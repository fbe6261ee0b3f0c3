"""``examples/compare/run.sh``: systems on tiny data under equal conditions, in one table and one picture."""

import json
import re
from pathlib import Path

import pytest

from fairseq_deep.tools.results import by_system, read
from tests.helpers import recipes
from tests.helpers.forkserver import stand_in
from tests.helpers.processes import live

# what fairseq-train says of a training
SAID = r"""
    echo '| INFO | num. shared model params: 1,234 (num. trained: 1,234)'
    echo '| INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "9", "ppl": "512", "wps": "1000", "wpb": "100",' \
      '"num_updates": "2", "ratio_enc": "0.5", "ratio_dec": "0.25"}'
    echo '| INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_ppl": "362", "valid_num_updates": "4"}'
"""
STUB = recipes.STUB.replace("    [[ ! -e $CALLS.hang ]]", f"{SAID}    [[ ! -e $CALLS.hang ]]")


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
    """Let fairseq-train save a checkpoint and then wait for SIGTERM, while a file says so."""
    path = tools / "fairseq-train"
    hang = f'({stand_in("fairseq-train")} --max-update 2) && echo $$ >"$CALLS.hanging"; '
    hang += """trap 'touch "$CALLS.told"; exit 75' TERM; while :; do sleep 0.1; done"""
    recipes.write_program(path, f"if [[ -e $CALLS.pause ]]; then {{ {hang}; }}; exit; fi\n{path.read_text()}")


def trained(calls):
    """Label and seed of the trainings since the last question, sorted; clears the list of calls."""
    found = re.findall(r"^fairseq-train .*/runs/(\S+)/checkpoints ", calls.read_text(), re.MULTILINE)
    calls.write_text("")
    return sorted(found)


def test_two_systems_with_two_seeds_killed_on_the_way(comparison, compare, tools, stubs, tmp_path):
    """Three real trainings, one real decoding: a checkpoint is gone on from, and nothing is done twice."""
    exp, pause = tmp_path / "comparison with blanks", Path(f"{stubs}.pause")
    make_real(tools, "fairseq-preprocess")
    make_real(tools, "fairseq-train", "[[ $* != */lstm/seed2/* ]]")
    make_slow(tools)
    make_real(tools, "fairseq-generate", "[[ $* == */lstm/seed1/* ]]")
    one = "--encoder-layers 1 --decoder-layers 1"
    systems = (f"plain=prenorm_6l {one}", f"lstm=lstm_6l {one}", "--", "--batch-size", "50")
    given = ("--exp", exp, "--seeds", "1,2")
    pause.touch()
    child, pid = recipes.begun(comparison(*given, *systems), stubs)
    child.kill()
    child.wait()
    pause.unlink()
    done = compare(*given, "--jobs", "2", *systems)  # at once: it waits for the end of the training
    assert done.returncode == 0, done.stderr + done.stdout
    assert not live(pid)
    assert Path(f"{stubs}.told").exists(), "it was told, and could save"
    assert trained(stubs) == ["lstm/seed1", "lstm/seed2", "plain/seed1", "plain/seed2"]
    assert done.stdout.count(": diagnose failed, ") == done.stdout.count("\nlstm seed 2: diagnose failed, ") == 1
    assert "plain seed 1: started (resumed)" in done.stdout and "4 of 4 runs left" in done.stdout
    assert "Loaded checkpoint" in (exp / "runs/plain/seed1/logs/4-train.log").read_text()

    record = json.loads((exp / "table.json").read_text())
    plain, lstm = record["systems"]
    trained_on = json.loads((exp / "runs/lstm/seed2/RESULT.json").read_text())["commit"]
    assert 1234 < plain["parameters"] != lstm["parameters"] > 1234
    assert plain["done"] == lstm["done"] == [1, 2] and record["updates"] == "4"
    assert list(plain["curve"]["1"]) == ["1", "2", "3", "4"] and plain["curve"]["1"] != plain["curve"]["2"]
    for row in (plain, lstm):
        assert row["valid_loss"]["min"] < row["valid_loss"]["max"] and row["bleu"]["mean"] == 12.34
        assert all(row[name]["mean"] > 0 for name in ("step_seconds", "ratio_encoder", "ratio_decoder"))
    for row in (plain, lstm):  # measured on the checkpoint, by diagnose
        assert abs(row["seeds"]["1"]["source_gain"]) < 1 and 0 < row["seeds"]["1"]["between_encoder"] < 1
        equal = row["seeds"]["1"].get("equal_time")  # none where the other was done before the first validation
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

    again = compare(*given, *systems)
    assert again.returncode == 0, again.stderr
    assert (exp / "table.md").read_text() == table
    assert recipes.programs(stubs) == []


def test_what_was_begun_is_extended_under_its_own_conditions(compare, stubs, corpus, tmp_path):
    """First without translations, of which the losses are compared."""
    exp, tables, systems = tmp_path / "exp", tmp_path / "tables", ("a=lstm_6l", "prenorm_6l")
    done = compare("--translate", "false", "--tables", tables, *systems)
    assert done.returncode == 0, done.stderr
    assert trained(stubs) == ["a/seed1", "prenorm_6l/seed1"] and "valid ppl 362" in done.stdout
    head = (tables / "table.md").read_text().splitlines()[0]
    assert "valid loss" in head and "BLEU" not in head and "difference" not in head
    assert (tables / "picture.png").exists() and not (exp / "table.md").exists() and head not in done.stdout
    assert not list(exp.glob("runs/*/seed1/generate-*"))
    again = compare("--tables", tables, *systems)
    assert again.returncode == 0, again.stderr
    assert trained(stubs) == [] and "BLEU" in (tables / "table.md").read_text().splitlines()[0]
    for words, *parts in (
        (["--updates", 3, "a=lstm_6l"], "another value of --updates: 4, now 3", "another --exp"),
        (["--beam", 2, "a=lstm_6l"], "another value of --beam: the default, now 2"),
        (["--width", 32, "a=lstm_6l"], "another value of --width: 16, now 32"),
        (["a=lstm_6l", "--", "--dropout", 0.2], "the flags after the lone --: the default, now --dropout 0.2"),
        (["a=rnn_6l"], "a was 'transformer_lstm_6l'", "now it is 'transformer_rnn_6l'"),
        # the rates of this schedule depend on the number of updates
        (["--updates", 8, "b=lstm_6l --lr-scheduler inverse_sqrt_cooldown"], "another value of --updates: 4, now 8"),
    ):
        recipes.assert_refused(compare("--dry-run", *words), *parts)
    for updates in (4, 8, 800):
        assert "--warmup-updates 1 " in compare("--dry-run", "--updates", updates, "a=lstm_6l").stdout, "as it began"
    assert compare("--dry-run", "b=lstm_6l --ddp-backend legacy_ddp --num-workers 0").returncode == 0, "the same model"
    text = exp / "shared/text/raw/valid.de"
    before = text.read_text()
    recipes.write_pairs(corpus, valid=[("new", "neu")] * 3)
    for system in ("a=lstm_6l", "rnn_6l"):  # one that is not there yet must not have them, either
        recipes.assert_refused(compare(system), "exp was begun with another value of the hash of the text: ")
    assert text.read_text() == before and not (exp / "runs/rnn_6l").exists()


def test_a_failed_system_is_marked_and_made_up_for(compare, tools, stubs, tmp_path):
    recipes.write_program(tools / "fairseq-train", STUB.replace("-e $CALLS.fail", "-e $CALLS.fail || $* != *rnn_6l*"))
    Path(f"{stubs}.fail").touch()
    listed = tmp_path / "systems.txt"
    listed.write_text("# depth-wise\n\nrnn_6l\nlstm_6l\n")
    for words, count in ((["--systems", listed], 2), (["rnn_6l"], 1)):  # a table of failures alone
        done = compare("--average", 3, *words)
        assert "rnn_6l seed 1: FAILED: stage 4 (train) failed: ValueError: planted\n" in done.stdout
        last = f"fairseq-deep compare: 1 of {count} runs failed: rnn_6l seed 1; the same command retries them\n"
        assert (done.returncode, done.stderr) == (3, last)
        table = (tmp_path / "exp/table.md").read_text()
        assert "| 0 of 1 (1 FAILED) |" in table and "FAILED: rnn_6l, seed 1: stage 4 (train) failed" in table
    assert trained(stubs) == ["lstm_6l/seed1", "rnn_6l/seed1", "rnn_6l/seed1"]
    Path(f"{stubs}.fail").unlink()
    run = tmp_path / "exp/runs/rnn_6l/seed1"
    (run / "diagnose.json").write_text('{"models": []}')  # of an older model
    done = compare("--average", 3, "--systems", listed)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (run / "diagnose.json").exists() and "rnn_6l seed 1: diagnose failed, " in done.stdout
    kept = ["checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"]  # what more updates would average
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept
    assert trained(stubs) == ["rnn_6l/seed1"] and "FAILED" not in (tmp_path / "exp/table.md").read_text()
