"""``examples/depthwise_lstm/compare.sh``: four systems on tiny data, side by side in one table."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import test_recipe as recipes

COMPARE = recipes.ROOT / "examples/depthwise_lstm/compare.sh"
SYSTEMS = ["prenorm_6l", "rnn_6l", "lstm_6l", "lstm_12l12l"]
WIDTH = 16

tools, corpus = recipes.tools, recipes.corpus


def compare(tools, corpus, exp, *words, flags=()):
    command = [str(COMPARE), "--data", str(corpus), "--exp", str(exp), "--ngpu", "0", *words, "--", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=recipes.environment(tools), timeout=300)


base_stubs = recipes.stubs


@pytest.fixture
def stubs(base_stubs, tools):
    """Those of the recipe; nor is this machine looked at, which takes seconds for every system."""
    body = f'[[ $* != *"report.py env"* ]] || exit 0\nexec {sys.executable} "$@"'
    recipes.write_program(tools / "python3", body)
    return base_stubs


def make_real(tools, name, condition="true"):
    """Let *name* be the real program again where *condition* holds; its calls are recorded all the same."""
    real = Path(sys.executable).parent / name
    call = f'echo "{name} $*" >>"$CALLS"; exec {real} "$@"'
    recipes.write_program(tools / name, f"if {condition}; then {call}; fi\n{recipes.STUB}")


def trained(calls):
    """The systems trained since the last question, sorted; the list of calls starts anew."""
    lines = [line.split() for line in calls.read_text().splitlines()]
    calls.write_text("")
    return sorted(line[line.index("--arch") + 1].partition("_")[2] for line in lines if line[0] == "fairseq-train")


def expected_parameters(vocabulary):
    """Counts by hand: X24, Section 3 (depth-wise), and stock layers with biases and a feed-forward width of 512."""
    d, ffn = WIDTH, 512
    attention, hidden, gates = 4 * d * d + 2 * d, 10 * d * d + 8 * d, 2 * (6 * d * d + 6 * d)
    stock = 18 * (4 * (d * d + d) + 2 * d) + 12 * (2 * d * ffn + ffn + d + 2 * d) + 2 * 2 * d
    rest = [stock, 18 * attention + 12 * hidden, 18 * attention + 12 * hidden + gates]
    return [vocabulary * d + count for count in (*rest, 36 * attention + 24 * hidden + gates)]


def test_four_systems_side_by_side_and_nothing_is_done_twice(tools, stubs, corpus, tmp_path):
    """Real training of every system, real decoding of one."""
    exp = tmp_path / "comparison with blanks"
    for name in ("fairseq-preprocess", "fairseq-train"):
        make_real(tools, name)
    make_real(tools, "fairseq-generate", "[[ $* == */lstm_6l/* ]]")
    words = (tools, corpus, exp, "--jobs", "2", "--updates", "4")  # one epoch, so that there is nothing to average
    flags = f"--encoder-embed-dim {WIDTH} --log-interval 1 --batch-size 50".split()
    done = compare(*words, flags=flags)
    assert done.returncode == 0, done.stderr + done.stdout
    assert trained(stubs) == sorted(SYSTEMS)

    record = json.loads((exp / "table.json").read_text())
    rows = record["systems"]
    assert [row["system"] for row in rows] == SYSTEMS
    dictionary = exp / "shared/data-bin/dict.de.txt"
    assert [row["parameters"] for row in rows] == expected_parameters(len(dictionary.read_text().splitlines()) + 4)
    assert all(row["updates"] == 4 and row["bleu"] == 12.34 and row["step_seconds"] > 0 for row in rows)
    assert len({row["valid_loss"] for row in rows}) == 4 and all(row["valid_ppl"] > 1 for row in rows)
    assert [row["sentences_per_second"] is None for row in rows] == [True, True, False, True]
    table = (exp / "table.txt").read_text()
    assert table in done.stdout
    assert [line.split()[0] for line in table.splitlines()[:5]] == ["system", *SYSTEMS]
    assert {(exp / system / "data-bin").resolve() for system in SYSTEMS} == {exp / "shared/data-bin"}

    again = compare(*words, flags=flags)
    assert again.returncode == 0, again.stderr
    assert (exp / "table.txt").read_text() == table and stubs.read_text() == ""


def test_a_failed_system_does_not_stop_the_others_and_is_made_up_for(tools, stubs, corpus, tmp_path):
    body = recipes.STUB.replace("-e $CALLS.fail", "-e $CALLS.fail || $* != *rnn_6l*")
    recipes.write_program(tools / "fairseq-train", body)
    Path(f"{stubs}.fail").touch()
    words = (tools, corpus, tmp_path / "exp", "--systems", "rnn_6l,lstm_6l")
    done = compare(*words)
    assert done.returncode == 1 and "stage 4 (train) failed: ValueError: planted" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: 1 of 2 systems failed")
    assert trained(stubs) == ["lstm_6l", "rnn_6l"] and not (tmp_path / "exp/table.txt").exists()
    Path(f"{stubs}.fail").unlink()
    done = compare(*words)
    assert done.returncode == 0, done.stderr
    assert trained(stubs) == ["rnn_6l"] and (tmp_path / "exp/table.txt").exists()


def test_training_ends_with_the_script(tools, stubs, corpus, tmp_path):
    hanging = Path(f"{stubs}.hanging")
    Path(f"{stubs}.hang").touch()
    command = [str(COMPARE), "--data", str(corpus), "--exp", str(tmp_path / "exp"), "--systems", "lstm_6l"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(command, env=recipes.environment(tools), **quiet)
    end = time.time() + 120
    while not (hanging.exists() and hanging.read_text()) and time.time() < end:
        assert child.poll() is None
        time.sleep(0.05)
    child.terminate()
    assert child.wait(30) == 130
    recipes.assert_gone(int(hanging.read_text()))


BAD = {
    "no such folder": (["--data", "/nowhere"], ["/nowhere: no such folder"]),
    "unknown system": (["--systems", "lstm_6l,lsmt_6l"], ["transformer_lsmt_6l", "did you mean transformer_lstm_6l?"]),
    "wildcard": (["--systems", "lstm_*"], ["'lstm_*'", "not the name of an architecture"]),
    "twice": (["--systems", "lstm_6l,rnn_6l,lstm_6l"], ["lstm_6l twice"]),
    "no system": (["--systems="], ["--systems names no architecture"]),
    "unknown size": (["--conf", "huge"], ["--conf takes mini, base, not 'huge'"]),
    "unknown option": (["--update", "5"], ["unknown option '--update'", "did you mean --updates?"]),
    "no jobs": (["--jobs", "0"], ["--jobs must be at least 1"]),
    "another batch": (["--max-tokens", "1000"], ["1,000 tokens per update, but this job is defined for"]),
}


@pytest.mark.parametrize("words, parts", BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_line(tools, corpus, tmp_path, words, parts):
    done = compare(tools, corpus, tmp_path / "exp", *words)
    recipes.assert_refused(done, *parts, status=2)
    assert not (tmp_path / "exp").exists()


def test_other_data_are_refused_before_the_text_is_touched(tools, stubs, corpus, tmp_path):
    words = (tools, corpus, tmp_path / "exp", "--systems", "lstm_6l")
    assert compare(*words).returncode == 0
    text = tmp_path / "exp/shared/text/raw/valid.de"
    before = text.read_text()
    recipes.write_pairs(corpus, "valid", [("new", "neu")] * 3)
    recipes.assert_refused(compare(*words), "lstm_6l", "trained on other data", status=2)
    assert text.read_text() == before


def test_without_data_or_with_help(tools):
    run = {"capture_output": True, "text": True, "env": recipes.environment(tools), "timeout": 60}
    done = subprocess.run([COMPARE], **run)
    recipes.assert_refused(done, "--data is missing", "{train,valid,test}.{en,de}", status=2)
    shown = subprocess.run([COMPARE, "--help"], **run)
    assert shown.returncode == 0 and "--systems" in shown.stdout and "--jobs" in shown.stdout
