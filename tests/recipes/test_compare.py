"""``examples/compare/run.sh``: systems on tiny data under equal conditions, in one table and one picture."""

import asyncio
import csv
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import changes, driver, engine, watch
from fairseq_deep.recipes.compare.systems import System
from fairseq_deep.recipes.record import result_line, write_json
from fairseq_deep.tools.command_lines import flags_of
from fairseq_deep.tools.results import by_system, read
from tests.helpers import recipes
from tests.helpers.forkserver import server
from tests.helpers.paths import ROOT

COMPARE = "fairseq_deep.recipes.compare"
FOLDER = ROOT / "examples/compare"
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
    return [str(word) for word in (FOLDER / "run.sh", *fixed, *more, *(("--", *flags) if flags else ()))]


def compare(tools, *given, **how):
    recipes.fork_drivers(tools)
    command, environment = words(*given, **how), recipes.environment(tools)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def stubs(stubs, tools):
    """Those of the recipe; nor is this machine looked at, which takes seconds."""
    recipes.write_program(tools / "fairseq-train", STUB)
    make_real(tools, "fairseq-deep", "[[ $1 == diagnose ]]")
    return stubs


def make_real(tools, name, condition="true"):
    """Let *name* be the real program where *condition* holds; its calls are recorded all the same."""
    call = f'echo "{name} $*" >>"$CALLS"; {server().stand_in(name)}'
    recipes.write_program(tools / name, f"if {condition}; then {call}; fi\n{STUB}")


def make_slow(tools):
    """Let fairseq-train save a checkpoint and then hang, while a file says so."""
    path = tools / "fairseq-train"
    hang = f'({server().stand_in("fairseq-train")} --max-update 2) && echo $$ >"$CALLS.hanging" && exec sleep 300'
    recipes.write_program(path, f"if [[ -e $CALLS.pause ]]; then {{ {hang}; }}; exit; fi\n{path.read_text()}")


def trained(calls):
    """Label and seed of the trainings since the last question, sorted; clears the list of calls."""
    found = re.findall(r"^fairseq-train .*/runs/(\S+)/checkpoints ", calls.read_text(), re.MULTILINE)
    calls.write_text("")
    return sorted(found)


def begin(tools, stubs, *given, **how):
    """Start the command and wait until a training hangs; return the process and the number of that training's."""
    hanging = Path(f"{stubs}.hanging")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(words(*given, **how), env=recipes.environment(tools), **quiet)
    end = time.time() + 240
    while not (hanging.exists() and hanging.read_text().endswith("\n")) and time.time() < end:
        assert child.poll() is None
        time.sleep(0.05)
    return child, int(hanging.read_text())


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
    child, pid = begin(tools, stubs, *given, flags=flags)
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
    settings = json.loads((exp / "runs/lstm/system.json").read_text())["settings"]
    assert settings["lstm_attn_residual"] is True and settings["encoder_layers"] == 1
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


def test_training_ends_with_the_script(tools, stubs, corpus, tmp_path):
    Path(f"{stubs}.hang").touch()
    child, pid = begin(tools, stubs, corpus, tmp_path / "exp", "lstm_6l")
    child.terminate()
    assert child.wait(30) == 130
    recipes.assert_gone(pid, 0.1)


def test_a_directory_that_cannot_be_made_is_one_line(tools, stubs, corpus, tmp_path):
    (tmp_path / "file").touch()
    done = compare(tools, corpus, tmp_path / "file/exp", "lstm_6l")
    said = f"cannot write to {tmp_path}/file/exp (Not a directory): choose another --exp"
    recipes.assert_refused(done, said, status=2)


def test_without_data_or_with_help(tools):
    run = {"capture_output": True, "text": True, "env": recipes.environment(tools), "timeout": 60}
    done = subprocess.run([FOLDER / "run.sh", "lstm_6l"], **run)
    recipes.assert_refused(done, "--data is missing", "{train,valid,test}.{en,de}", status=2)
    shown = subprocess.run([FOLDER / "run.sh", "--help"], **run)
    assert shown.returncode == 0 and "LABEL=NAME FLAGS" in shown.stdout and "--jobs" in shown.stdout


@pytest.fixture
def modules(monkeypatch):
    """The modules behind the command, in this process."""
    monkeypatch.setenv("FAIRSEQ_DEEP_ENV", "current")
    monkeypatch.setenv("FAIRSEQ_DEEP_CHECKED", shutil.which("python") or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = {"compare": "driver", **{name: name for name in ("options", "results", "table", "trainings", "picture")}}
    found = {name: importlib.import_module(f"{COMPARE}.{module}") for name, module in names.items()}
    return SimpleNamespace(**found)


def call(modules, monkeypatch, capsys, exp, data, *systems, recipe=(), flags=(), **options):
    """What ``run.sh`` starts, without the seconds that it takes to load; return the status and the output."""
    values = dict(conf="mini", seeds="1", updates="4", width=WIDTH, heads="2", jobs="1", ngpu="0")
    values.update({"dry_run": "true", "table_only": "false", "exp": exp, "data": data, **options})
    given = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(os, "environ", dict(os.environ))
    status = driver.main(["compare", "run.sh", *given, *recipe, *systems, *(["--", *flags] if flags else [])])
    return status, capsys.readouterr()


BAD = {
    "unknown size": (["lstm_6l"], {"conf": "huge"}, ["--conf must be mini, base, not 'huge'"]),
    "unknown option": (["lstm_6l"], {"update": "5"}, ["unknown option '--update'", "did you mean --updates?"]),
    "no jobs": (["lstm_6l"], {"jobs": "0"}, ["--jobs must be a whole number of at least 1"]),
    "unknown system": (["lsmt_6l"], {}, ["unknown architecture 'lsmt_6l'", "did you mean transformer_lstm_6l?"]),
    "wildcard": (["lstm_*"], {}, ["unknown architecture 'lstm_*'", "fairseq-deep archs"]),
    "unknown flag": (["dlcl_6l --dlcl-fixd"], {}, ["dlcl_6l_dlcl-fixd: unknown flag '--dlcl-fixd'", "--dlcl-fixed?"]),
    "unknown method": (["x=prenorm_6l --layer-agg dcl"], {}, ["x: unknown --layer-agg dcl", "did you mean dlcl?"]),
    "without meaning": (["x=lstm_6l --deep-init ds"], {}, ["x: --deep-init ds is not supported with --layer-agg lstm"]),
    "no value": (["dlcl_6l --encoder-layers"], {}, ["--encoder-layers: expected one argument"]),
    "own updates": (["a=dlcl_6l --max-update 9"], {}, ["a: --max-update must be the same for all systems"]),
    "own loss": (["a=dlcl_6l --sentence-avg"], {}, ["a: --sentence-avg must be the same for all systems"]),
    "own start": (["a=dlcl_6l --finetune-from-model x.pt"], {}, ["a: --finetune-from-model must be the same"]),
    "own text": (["a=dlcl_6l --max-source-positions 20"], {}, ["a: --max-source-positions must be the same"]),
    "own device": (["a=dlcl_6l --bf16"], {}, ["a: --bf16 is set by this script: see --exp, --precision"]),
    "not in quotes": (["dlcl_6l one"], {}, ["'one' is not a flag", "quotes"]),
    "open quote": (["dlcl_6l 'one"], {}, ["No closing quotation"]),
    "twice": (["lstm_6l", "transformer_lstm_6l"], {}, ["lstm_6l is given twice"]),
    "label": (["a/b=lstm_6l"], {}, ["'a/b' cannot name a system"]),
    "no system": ([], {}, ["no system to train"]),
    "no file": ([], {"systems": "/nowhere"}, ["--systems /nowhere cannot be read"]),
    "seeds": (["lstm_6l"], {"seeds": "1,b"}, ["--seeds must be a number, such as 3, or a list", "'1,b'"]),
    "no seeds": (["lstm_6l"], {"seeds": "00"}, ["--seeds must be a number"]),
    "seed in two ways": (["lstm_6l"], {"seeds": "1,01"}, ["--seeds must be a number"]),
    "seeds twice": (["lstm_6l"], {"seeds": "1,1"}, ["--seeds 1,1 has seed 1 twice"]),
    "heads": (["lstm_6l"], {"heads": "3"}, ["--width 16 is not divisible by 3 heads"]),
    "heads of no width": (["lstm_6l"], {"width": "0"}, ["--heads has no effect with --width 0"]),
    "seed of no search": (["lstm_6l"], {"tune_seed": "7"}, ["--tune-seed has no effect without --tune lr"]),
    "no validation": (["lstm_6l"], {"flags": ["--disable-validation"]}, ["--disable-validation is not supported"]),
    "updates after --": (["lstm_6l"], {"flags": ["--max-update=9"]}, ["--max-update is set by this script: see"]),
    "no updates": (["lstm_6l"], {"updates": "0"}, ["--updates must be at least 1"]),
    "batch": (["lstm_6l"], {"recipe": ["--max-tokens", "1000"]}, ["1,000 tokens per update, but this job is defined"]),
    "no such folder": (["lstm_6l"], {"data": "/nowhere"}, ["/nowhere: no such directory"]),
    "shared flag": (["lstm_6l"], {"flags": ["--fp16"]}, ["--fp16 is set by this script"]),
    "no table": (["lstm_6l"], {"table_only": "true", "dry_run": "false"}, ["has no finished training run"]),
    "seed of final runs": (["lstm_6l"], {"tune": "lr", "tune_seed": "2", "seeds": "3"},
                           ["--tune-seed 2 must not be in --seeds"]),
    "one depth": (["lstm_6l"], {"depths": "6"}, ["--depths must be two or more different numbers of encoder layers"]),
    "a depth twice": (["lstm_6l"], {"depths": "6,6"}, ["not '6,6'"]),
    "depth is no number": (["lstm_6l"], {"depths": "6,x"}, ["not '6,x'"]),
    "depth in two ways": (["prenorm_6l --encoder-layers 3"], {"depths": "1,2"},
                          ["--depths sets --encoder-layers: omit one"]),
    "rates by epoch": (["prenorm_6l --lr 0.1,0.2"], {"tune": "lr"}, ["--lr 0.1,0.2: --tune lr searches a single rate"]),
    "no rate": (["prenorm_6l --lr 0"], {"tune": "lr"}, ["--lr 0: --tune lr searches a single rate; give one positive"]),
    "nothing searched": (["lstm_6l"], {"tune": "lr", "table_only": "true", "dry_run": "false"},
                         ["the search for learning rates is incomplete: omit --table-only"]),
}  # fmt: skip


@pytest.mark.parametrize("systems, how, parts", BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_line(modules, monkeypatch, capsys, corpus, tmp_path, systems, how, parts):
    how = {"data": corpus, **how}
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", how.pop("data"), *systems, **how)
    done = SimpleNamespace(returncode=status, stderr=printed.err)
    recipes.assert_refused(done, *parts, status=2)
    assert not (tmp_path / "exp").exists()


def test_a_dry_run_shows_what_would_be_trained(modules, monkeypatch, capsys, corpus, tmp_path):
    systems = ("prenorm_6l", "fixed=dlcl_6l --dlcl-fixed", "encoder=lstm_6l --decoder-layer-agg residual")
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, *systems, seeds="1,2")
    assert status == 0 and "6 of 6 runs left" in printed.out
    commands = [line.split() for line in printed.out.splitlines() if line.startswith("fairseq-train")]
    assert [command[-1] for command in commands] == ["64", "--dlcl-fixed", "residual"]
    shown = [
        [flag in command for flag in ("--encoder-ffn-embed-dim", "--decoder-ffn-embed-dim")] for command in commands
    ]
    assert shown == [[True, True], [True, True], [False, True]]
    assert all("--log-depth-interval" in command and "--max-update" in command for command in commands)
    assert not (tmp_path / "exp").exists()


def test_the_list_of_modern_methods_is_accepted(modules, monkeypatch, capsys, corpus, tmp_path):
    listed = ROOT / "examples/compare/modern.txt"
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, systems=listed)
    count = sum("=" in line and not line.startswith("#") for line in listed.read_text().splitlines())
    assert status == 0 and f"{count} of {count} runs left" in printed.out


SEARCH = {"tune": "lr", "seeds": "1"}
WARMUPS = {  # settings: warm-up of the runs, and of the search
    "the size's": ({"updates": "2000"}, {"500"}, ""),
    "longer": ({"updates": "4000"}, {"500"}, ""),
    "shorter": ({"updates": "40"}, {"10"}, "updates: 10, not 500"),
    "given": ({"updates": "40", "flags": ["--warmup-updates", "6"]}, {"6"}, ""),
    "shorter search": ({"updates": "40", "tune_updates": "20", **SEARCH}, {"10"}, "10, 5 in the search, not 500"),
    "given, shorter search": ({"updates": "40", "tune_updates": "20", "flags": ["--warmup-updates", "6"], **SEARCH},
                              {"6"}, "6, 3 in the search, not 6"),
    "a system's own is too long": ({"updates": "9"}, {"2"}, "warning: b: training ends within its warm-up (--"
                                   "max-update 9, --warmup-updates 9)\n"),
}  # fmt: skip


@pytest.mark.parametrize("how, lengths, said", WARMUPS.values(), ids=WARMUPS)
def test_a_shorter_training_has_a_shorter_warm_up(modules, monkeypatch, capsys, corpus, tmp_path, how, lengths, said):
    """And keeps it if more updates are asked for later."""
    exp = tmp_path / "exp"
    systems = ("a=lstm_6l", "b=dlcl_6l --warmup-updates 9")
    status, printed = call(modules, monkeypatch, capsys, exp, corpus, *systems, **how)
    found = [re.findall(r"--warmup-updates (\d+)", line)[-1] for line in printed.out.splitlines() if "fairseq-" in line]
    assert status == 0 and found == [*lengths, "9"], printed
    assert said in printed.out if said else "warm-up" not in printed.out
    assert printed.out.count("warning: ") == said.count("warning: ")


@pytest.mark.parametrize("shared, own", [((), ("polynomial_decay",)), (("fixed",), ()), (("cosine",), ("fixed",))])
def test_schedules_without_a_first_rate_have_none(modules, monkeypatch, capsys, corpus, tmp_path, shared, own):
    """The conf files set it for the usual schedule; fairseq's parser would not know the flag."""
    shared, own = ([word for name in names for word in ("--lr-scheduler", name)] for names in (shared, own))
    systems = ("a=lstm_6l", " ".join(["b=dlcl_6l", *own]))
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, *systems, flags=shared)
    commands = [flags_of(line.split()) for line in printed.out.splitlines() if "fairseq-train" in line]
    assert status == 0 and len(commands) == 2, printed.err
    for flags in commands:
        assert ("--warmup-init-lr" in flags) == (flags["--lr-scheduler"] in ("inverse_sqrt", "cosine"))


def test_the_search_scales_a_systems_own_schedule():
    words = ["--warmup-updates", "9", "--lr", "1", "--cooldown-updates", "1"]
    assert changes.scaled(words, 1 / 3) == ["--warmup-updates", "3", "--cooldown-updates", "1"]
    assert changes.scaled(words, 1) == changes.scaled(["--warmup-updates", "0"], 0.5) == []


SCHEDULE = ["--lr-scheduler", "inverse_sqrt_cooldown", "--warmup-updates", "1"]


def test_changed_conditions_are_refused_and_more_updates_taken(modules, monkeypatch, capsys, corpus, tmp_path):
    exp = tmp_path / "exp"
    ask = lambda *systems, **how: call(modules, monkeypatch, capsys, exp, corpus, *systems, **how)  # noqa: E731

    def refuse(*parts, system="a=lstm_6l", **how):
        status, printed = ask(system, **how)
        recipes.assert_refused(SimpleNamespace(returncode=status, stderr=printed.err), *parts, status=2)

    words = f"--conf mini --average 1 --updates 4 --width {WIDTH} --heads 2".split()
    args = driver.read_options("compare", words, modules.options.Compare())
    args.scales = [4 / 2000, 1]
    (exp / "runs/a").mkdir(parents=True)
    write_json(str(exp / "conditions.json"), modules.options.conditions(args))
    write_json(str(exp / "runs/a/system.json"), {"system": "transformer_lstm_6l", "settings": {}})
    for updates in ("4", "8"):
        status, printed = ask("a=lstm_6l", updates=updates)
        assert status == 0 and "--warmup-updates 1 " in printed.out, "as it was begun"
    refuse("another value of --updates: 4, now 3", "another --exp", updates="3")
    refuse("another value of --beam: the default, now 2", recipe=["--beam", "2"])
    refuse("another value of --width: 16, now 32", width="32")
    refuse("the flags after the lone --: the default, now --dropout 0.2", flags=["--dropout", "0.2"])
    refuse("a was 'transformer_lstm_6l'", "now it is 'transformer_rnn_6l'", system="a=rnn_6l")

    def note(**settings):
        known = {"system": "transformer_lstm_6l", "settings": settings}
        write_json(str(exp / "runs/a/system.json"), known)

    note(lstm_attn_residual=True, of_another_version=1, encoder_embed_dim=WIDTH, log_depth_interval=1)
    assert ask("a=lstm_6l")[0] == 0 and ask("a=lstm_6l", updates="800")[0] == 0
    assert ask("b=lstm_6l --ddp-backend legacy_ddp --num-workers 0")[0] == 0, "they change nothing that is learned"
    # the rates of this schedule depend on the number of updates
    args.extra = SCHEDULE
    write_json(str(exp / "conditions.json"), modules.options.conditions(args))
    assert ask("a=lstm_6l", flags=args.extra)[0] == 0
    refuse("another value of --updates: 4, now 8", "another --exp", flags=args.extra, updates="8")
    args.extra = []
    write_json(str(exp / "conditions.json"), modules.options.conditions(args))
    own = f"b=lstm_6l {shlex.join(SCHEDULE)}"
    refuse("another value of --updates: 4, now 8", "another --exp", system=own, updates="8")
    note(lstm_attn_residual=False)
    refuse("a in", "has lstm_attn_residual False", "now presets True", "another --exp")


def test_a_failed_system_is_marked_and_made_up_for(modules, monkeypatch, capsys, tools, stubs, corpus, tmp_path):
    monkeypatch.setenv("PATH", recipes.environment(tools)["PATH"])
    recipes.write_program(tools / "fairseq-train", STUB.replace("-e $CALLS.fail", "-e $CALLS.fail || $* != *rnn_6l*"))
    Path(f"{stubs}.fail").touch()
    listed = tmp_path / "systems.txt"
    listed.write_text("# depth-wise\n\nrnn_6l\nlstm_6l\n")
    how = {"systems": listed, "dry_run": "false"}
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, **how)
    assert "rnn_6l seed 1: FAILED: stage 4 (train) failed: ValueError: planted\n" in printed.out
    last = "error: 1 of 2 runs failed: rnn_6l seed 1; the same command retries them\n"
    assert status == 3 and printed.err == last
    table = (tmp_path / "exp/table.md").read_text()
    assert "| 0 of 1 (1 FAILED) |" in table and "FAILED: rnn_6l, seed 1: stage 4 (train) failed" in table
    assert trained(stubs) == ["lstm_6l/seed1", "rnn_6l/seed1"]
    alone, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, "rnn_6l", **{**how, "systems": ""})
    assert alone == 3 and printed.err.startswith("error: 1 of 1 runs failed: rnn_6l seed 1;")
    assert "| 0 of 1 (1 FAILED) |" in (tmp_path / "exp/table.md").read_text(), "a table of failures alone"
    trained(stubs)
    Path(f"{stubs}.fail").unlink()
    status, printed = call(modules, monkeypatch, capsys, tmp_path / "exp", corpus, **how)
    assert status == 0 and not printed.err
    assert trained(stubs) == ["rnn_6l/seed1"] and "FAILED" not in (tmp_path / "exp/table.md").read_text()


def test_other_data_are_refused_before_the_text_is_touched(
    modules, monkeypatch, capsys, tools, stubs, corpus, tmp_path
):
    monkeypatch.setenv("PATH", recipes.environment(tools)["PATH"])
    given = (modules, monkeypatch, capsys, tmp_path / "exp", corpus, "lstm_6l")
    assert call(*given, dry_run="false")[0] == 0
    text = tmp_path / "exp/shared/text/raw/valid.de"
    before = text.read_text()
    recipes.write_pairs(corpus, valid=[("new", "neu")] * 3)
    status, printed = call(*given, dry_run="false")
    done = SimpleNamespace(returncode=status, stderr=printed.err)
    recipes.assert_refused(done, "exp was begun with another value of the hash of the text: ", status=2)
    others = (*given[:-1], "rnn_6l")  # a system that is not there yet must not have them, either
    status, printed = call(*others)
    recipes.assert_refused(SimpleNamespace(returncode=status, stderr=printed.err), "the hash of the text", status=2)
    assert text.read_text() == before and not (tmp_path / "exp/runs/rnn_6l").exists()
    conditions = json.loads((tmp_path / "exp/conditions.json").read_text())
    del conditions["the hash of the text"]  # as begun by version 0.3
    write_json(str(tmp_path / "exp/conditions.json"), conditions)
    status, printed = call(*given)
    done = SimpleNamespace(returncode=status, stderr=printed.err)
    recipes.assert_refused(done, "lstm_6l/seed1 has a model trained on other data", status=2)


LINES = {"ref": [f"the number {n} is on line {n * n} of this text" for n in range(60)]}
LINES["good"] = [line.replace("text", "page") if n % 3 else line for n, line in enumerate(LINES["ref"])]
LINES["bad"] = [line.replace("is on line", "was at place") if n % 4 else line for n, line in enumerate(LINES["good"])]


def bleu(name):
    return sacrebleu.corpus_bleu(LINES[name], [LINES["ref"]]).score


def plan(folder, updates="", average=1):
    """What a run needs of its plan."""
    options = SimpleNamespace(average=average, source_lang="en", stage=0, stop_stage=7)
    return SimpleNamespace(exp=str(folder), options=options, train_value=lambda *_: updates or "0", keys=["key"] * 8)


def write_run(folder, kind, losses, parameters):
    """A finished training as the recipe leaves it."""
    (folder / "logs").mkdir(parents=True)
    fixed = {
        "tokens_per_update": 64,
        "updates": 4,
        "precision": "fp32",
        "devices": "1 CPU",
        "hardware": "h",
        "commit": "c",
    }
    result = {"bleu": round(bleu(kind), 2), "parameters": parameters, "signature": "s", "date": "d", **fixed}
    (folder / "RESULT.json").write_text(json.dumps(result))
    records = [{"kind": "train_inner", "num_updates": n, "wps": 100, "wpb": 50, "ratio_enc": n} for n in (1, 2, 6)]
    for number, loss in enumerate(losses, 1):
        valid = {"epoch": 1, "valid_num_updates": number, "valid_loss": loss, "valid_ppl": 2**loss}
        records.append({"kind": "valid", **valid})
    # what was done once more after a stop counts as it was the last time
    records.insert(0, {**records[-1], "valid_loss": 0.1})
    lines = (json.dumps({"time": 1, "session": 1, **record}) for record in records)
    (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "logs/6-generate.log").write_text(
        "Translated 60 sentences (90 tokens) in 2.0s (30.00 sentences/s, 45.0 tokens/s)\n"
    )
    for name, lines in (("hyp", LINES[kind]), ("ref", LINES["ref"])):
        (folder / f"test.{name}.de").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def finished(modules, tmp_path):
    """Rows of three systems with three seeds; one training failed, one has not started."""
    systems = [System(name, f"transformer_{name}", []) for name in ("base", "same", "worse")]
    runs = []
    for system in systems:
        for seed in (1, 2, 3):
            run = modules.trainings.Run(system, seed, plan(tmp_path / system.label / f"seed{seed}"))
            runs.append(run)
            if system.label == "worse" and seed > 1:
                continue
            kind = "bad" if system.label == "worse" else "good"
            write_run(Path(run.folder), kind, [9 + seed, 7 + seed, 8 + seed], 1000 * len(system.label))
            Path(run.folder, ".done.7").write_text("key\n")
    failed = Path(runs[7].folder)
    failed.mkdir(parents=True)
    (failed / "failure.txt").write_text("stage 4 (train) failed: loss is NaN\n")
    return modules.results.rows(systems, runs), runs


def test_values_and_their_spread_over_seeds(finished):
    rows, _ = finished
    base, same, worse = rows
    assert base["valid_loss"] == {"mean": 9.0, "min": 8.0, "max": 10.0, "std": 1.0} and base["difference"] is None
    assert base["curve"][2] == {1: 11.0, 2: 9.0, 3: 10.0}
    assert base["seeds"][1]["ratio_encoder"] == 2 and base["seeds"][1]["ratio_decoder"] is None
    assert base["seeds"][1]["step_seconds"] == 0.5 and base["seeds"][1]["tokens_per_second"] == 45
    assert worse["done"] == [1] and worse["failed"] == {2: "stage 4 (train) failed: loss is NaN"}
    assert worse["difference"]["mean"] == pytest.approx(bleu("bad") - bleu("good"), abs=0.01)
    assert worse["bleu"]["std"] is None
    assert (same["tests"]["p"], worse["tests"]) == (1, {}), "one seed has no p"


def test_halves_and_domains_of_the_test_set(finished, modules, tmp_path):
    """The hash of the source alone decides; domains are of the reporting half, and all tests are on it."""
    _, runs = finished
    sources = [f"sentence {n % 50}" for n in range(60)]
    tags = ["php" if n % 3 else "news" for n in range(60)]
    for name, lines in (("base/seed1/text/raw/test.en", sources), ("base/seed1/score-test.json", []), ("tags", tags)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    numbers = [int(hashlib.sha256(source.encode()).hexdigest()[:2], 16) for source in sources]
    reporting = [n for n in range(60) if numbers[n] % 2]
    wanted = {"choosing": [n for n in range(60) if n not in reporting], "reporting": reporting}
    wanted.update((tag, [n for n in reporting if tags[n] == tag]) for tag in ("php", "news"))
    parts = modules.results.read_parts(runs, str(tmp_path / "tags"), True)
    assert parts == wanted and all(parts.values())
    assert modules.results.read_parts(runs, str(tmp_path / "tags"), False).keys() == {"php", "news"}
    assert modules.results.read_parts(runs, "", False) == {}
    rows = modules.results.rows([run.system for run in runs[::3]], runs, str(tmp_path), parts, 0.25)
    for (part, indices), row, kind in itertools.product(parts.items(), rows, ("good", "bad")):
        hypotheses, references = ([LINES[name][n] for n in indices] for name in (kind, "ref"))
        if row["system"] == ("worse" if kind == "bad" else "base"):
            score = sacrebleu.corpus_bleu(hypotheses, [references]).score
            assert row[f"bleu {part}"]["mean"] == pytest.approx(score, abs=0.006), f"{row['system']}, {part}"
            assert row[f"chrf {part}"]["mean"] == pytest.approx(
                sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=0.006
            )
    base, same, worse = rows
    assert base["bleu"] == base["bleu reporting"] != base["bleu choosing"]
    assert worse["difference"]["mean"] == pytest.approx(worse["bleu"]["mean"] - base["bleu"]["mean"])
    assert (same["tests"], worse["tests"]) == ({"half": 0, "p": 1, "p_equal": 0, "margin": 0.25}, {})
    assert read(str(tmp_path))[0]["bleu"] == round(bleu("good"), 2), "the record has the whole test set"
    text = modules.table.write(str(tmp_path), rows, modules.results.facts(rows))
    assert "| BLEU, choosing | BLEU, php | BLEU, news |" in re.sub(" +", " ", text) and "BLEU, reporting" not in text
    assert "p equal: of a difference of 0.25 BLEU or more" in text and "tests: reporting half of the test set" in text
    (tmp_path / "tags").write_text("php\n")
    with pytest.raises(UsageError, match="tags has 1 lines for 60 test sentences: give one domain per line"):
        modules.results.read_parts(runs, str(tmp_path / "tags"), False)
    (tmp_path / "base/seed1/text/raw/test.en").write_text("one\n")
    with pytest.raises(UsageError, match="a half of the 1 test sentences is empty: omit --halves"):
        modules.results.read_parts(runs, "", True)


def test_table_and_picture_of_what_is_there(finished, modules, tmp_path, monkeypatch, capsys):
    rows, _ = finished
    folder = str(tmp_path)
    text = modules.table.write(folder, rows, modules.results.facts(rows))
    lines = text.splitlines()
    assert len({len(line) for line in lines[:5]}) == 1 and len({line.count("|") for line in lines[:5]}) == 1
    assert "source gain" not in lines[0], "no run has it"
    assert "| 9.000 [8.000, 10.000] |" in lines[2] and "1 of 3 (1 FAILED)" in lines[4]
    assert "- FAILED: worse, seed 2: stage 4 (train) failed: loss is NaN" in lines
    assert "seeds 1, 2, 3" in text
    with open(tmp_path / "table.csv", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert [row["system"] for row in table] == ["base", "same", "worse"]
    assert table[0]["valid_loss_max"] == "10.0" and table[2]["seeds_failed"] == "2" and table[2]["bleu_std"] == ""
    pytest.importorskip("matplotlib")
    modules.picture.draw(rows, str(tmp_path / "picture.svg"))
    drawn = (tmp_path / "picture.svg").read_text()
    rows[2]["curve"][1][4] = math.inf
    rows[1]["curve"][1] = {100: 8.0}  # an update that no other seed has
    modules.picture.draw(rows, str(tmp_path / "infinite.svg"))
    assert all(re.findall(rf">{name}( +0.00M)?<", drawn) for name in ("base", "same", "worse")), "legend and ranking"
    monkeypatch.setattr(modules.picture.pictures, "save_figure", lambda figure, _: saved.append(figure))
    for losses, top in (((10.0, 1e9), 22), ((10.0, 1e9, math.nan), 22), ((30.0, 20.0), 30)):
        saved = []
        rows[2]["curve"][1] = dict(enumerate(losses, 1))
        modules.picture.draw(rows, "")
        assert round(saved[0].axes[0].get_ylim()[1]) in (top, top + 1), "a diverged run does not flatten the others"


def test_without_matplotlib_there_is_a_table_all_the_same(finished, modules, monkeypatch, tmp_path, capsys):
    rows, _ = finished
    monkeypatch.setattr(modules.compare.results, "rows", lambda *_: rows)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    modules.compare.report(modules.options.Compare(exp=str(tmp_path), tables=""), [], [])
    printed = capsys.readouterr().out
    assert "pip install matplotlib" in printed.splitlines()[-1] and (tmp_path / "table.md").exists()
    assert not (tmp_path / "picture.png").exists()


def test_losses_at_equal_time(modules):
    """Those of the slower ones where they were when the fastest had done all of its updates."""
    curves = {
        "fast": {1: {10: 6.0, 20: 5.0}, 2: {10: 6.5, 20: 5.5}},
        "slow": {1: {10: 4.0, 20: 3.0}, 2: {12: 4.0, 20: 3.0}},
        "untimed": {1: {10: 9.0}},
        "slowest": {1: {10: 8.0}},
    }
    steps = {"fast": 1.0, "slow": 4 / 3, "untimed": None, "slowest": 4.0}
    rows = [{"done": list(seeds), "curve": seeds, "seeds": {seed: {"step_seconds": steps[name]} for seed in seeds}}
            for name, seeds in curves.items()]  # fmt: skip
    modules.results.add_equal_time(rows)
    found = [[figures.get("equal_time") for figures in row["seeds"].values()] for row in rows]
    assert found == [[5.0, 5.5], [pytest.approx(3.5), pytest.approx(3.625)], [None], [None]]
    modules.results.add_equal_time([])


def test_a_second_command_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPE_PATIENCE", "0")
    for _ in range(2):
        with engine.Engine() as first, engine.Engine() as second:
            first.take_lock(str(tmp_path))
            with pytest.raises(engine.UsageError, match=rf"in use by process {os.getpid()} on "):
                second.take_lock(str(tmp_path))


@pytest.mark.parametrize(
    "average, kept", [(1, ["checkpoint_last.pt"]), (3, ["checkpoint2.pt", "checkpoint_last.pt"])]
)
def test_what_more_updates_would_average_is_kept(modules, tmp_path, average, kept):
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoint2.pt", "checkpoint_best.pt", "checkpoint_last.pt"):
        (tmp_path / "checkpoints" / name).touch()
    system = SimpleNamespace(label="a", ours=True)
    run = modules.trainings.Run(system, 1, plan(tmp_path, average=average))
    run.prune()
    (tmp_path / ".done.7").write_text("key\n")
    assert not run.is_done(), "without its figures it is to be done again"
    (tmp_path / "RESULT.json").touch()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept and run.is_done()


def work(modules, folder, *runs):
    """Names of the failed runs of a queue."""
    args = SimpleNamespace(exp=str(folder), jobs=1, ngpu=0, devices=0)
    with engine.Engine() as running:
        return asyncio.run(modules.trainings.Trainings(running, runs, args).work())


def stub_stages(modules, monkeypatch, stages):
    """Let the runs of a queue have the stages *stages*, a function of their plan and log."""

    async def run_stages(self, *_):
        stages(self.plan, self.out)

    def report(runner):
        Path(runner.plan.exp, "RESULT.json").touch()
        return {"valid_ppl": 2.0}

    monkeypatch.setattr(modules.trainings.Runner, "run_stages", run_stages)
    monkeypatch.setattr(modules.trainings, "report_result", report)
    monkeypatch.setattr(modules.trainings, "link_text", lambda *_: None)


def make_run(modules, folder, **system):
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / ".done.7").write_text("key\n")
    run_plan = plan(folder)
    run_plan.options.dry_run, run_plan.path = False, lambda *parts: str(folder.joinpath(*parts))
    return modules.trainings.Run(SimpleNamespace(label=folder.name, **system), 1, run_plan)


def test_the_worth_of_the_source_is_not_an_older_models(modules, tmp_path, tools, monkeypatch, capsys):
    """A ``diagnose`` that fails leaves nothing, also where there was a figure before more updates."""
    recipes.write_program(tools / "fairseq-deep", "exit 1")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    stub_stages(modules, monkeypatch, lambda *_: None)
    run = make_run(modules, tmp_path / "a", ours=True)
    (tmp_path / "a/diagnose.json").write_text('{"models": []}')
    assert work(modules, tmp_path, run) == [] and run.is_done()
    assert not (tmp_path / "a/diagnose.json").exists() and "a seed 1: diagnose failed, " in capsys.readouterr().out


def test_a_full_disk_fails_one_run_and_not_the_queue(modules, tmp_path, monkeypatch):
    """The log of the first run cannot be written; the second one finishes."""
    stub_stages(modules, monkeypatch, lambda _, log: print("epoch", file=log, flush=True))
    runs = [make_run(modules, tmp_path / name, ours=False) for name in "ab"]
    (tmp_path / "a/recipe.log").symlink_to("/dev/full")
    assert work(modules, tmp_path, *runs) == ["a seed 1"]
    assert "No space left on device" in runs[0].reason() and runs[1].is_done()


def test_gpus_are_shared_where_there_are_fewer_than_trainings(modules, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    devices = modules.trainings.devices_of
    assert devices(3, 1, 2) == ["0", "1", "0"] and devices(2, 2, 4) == ["0,1", "2,3"] and devices(2, 0, 0) == ["", ""]


def test_torn_lines_of_a_training_are_left_out(finished, modules):
    _, runs = finished
    folder = Path(runs[0].folder)
    whole = result_line(str(folder), seed=1)
    (folder / "train.jsonl").write_text((folder / "train.jsonl").read_text() + '{"kind": "valid", "valid_num_up')
    assert result_line(str(folder), seed=1) == whole
    train = watch.Train(str(folder), (0, 0, 0))
    train.note("session", {"commit": "x"})
    train.finish(True)
    assert json.loads((folder / "train.jsonl").read_text().splitlines()[-1])["commit"] == "x"
    assert result_line(str(folder), seed=1) == whole
    (folder / "RESULT.json").write_text('{"bleu":')
    with pytest.raises(modules.compare.UsageError):
        result_line(str(folder))


def test_a_loss_that_is_no_number_is_shown_as_it_is(finished, modules):
    nan = float("nan")
    for values in ([nan, 4.0], [4.0, nan]):
        assert modules.table.show(modules.results.spread(values), ".2f", True) == "nan [nan, nan]"
    assert modules.table.show(modules.results.spread([4.0, float("inf")]), ".1f", True) == "inf [4.0, inf]"
    assert modules.results.spread([4.0])["std"] is None
