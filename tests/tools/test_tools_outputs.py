"""No output of a command is one of its inputs, whatever it is called; closed and full streams end in one line."""

import io
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_deep.errors import printable
from fairseq_deep.tools import UsageError, check_outputs, main
from tests.helpers.paths import ROOT

COMMAND = [sys.executable, str(ROOT / "tests/helpers/runtime_alone.py")]  # as importing fairseq takes seconds
TOLD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def place(tmp_path):
    """A recipe's directory, a checkpoint with its parts, logs and texts: names and sizes are enough to be refused."""
    for name in ("run/averaged.pt", "run/RESULT.json", "run/train.sh", "run/train.jsonl", "run/test.hyp.de",
                 "run/test.ref.de", "run/data-bin/dict.en.txt", "run/data-bin/dict.de.txt", "run/text/bpe/code",
                 "lone.pt", "dict.en.txt", "dict.de.txt", "code", "steps.json", "in.txt", "hyp.txt", "ref.txt",
                 "gen.txt", "log.jsonl", "pairs/test.en-de.hyp", "pairs/test.en-de.ref", "other.pt", "pkg/config.json",
                 "pkg/model.safetensors", "epochs/checkpoint1.pt", "epochs/checkpoint2.pt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    return tmp_path


RUN = ["run/averaged.pt", "run/data-bin/dict.en.txt", "run/text/bpe/code", "run/train.jsonl"]
CASES = {  # command with OUT for the output, and inputs that OUT must not be
    "translate run": (["translate", "run", "--input", "in.txt", "--output", "OUT"], [*RUN, "in.txt"]),
    "translate a checkpoint": (["translate", "lone.pt", "--input", "in.txt", "--output", "OUT"],
                               ["lone.pt", "code", "dict.en.txt", "steps.json", "in.txt"]),
    "translate parts": (["translate", "lone.pt", "--bpe-codes", "hyp.txt", "--data", "run/data-bin", "--output", "OUT"],
                        ["hyp.txt", "run/data-bin/dict.de.txt"]),
    "weights csv": (["plot", "weights", "lone.pt", "--csv", "OUT"], ["lone.pt"]),
    "weights json": (["plot", "weights", "lone.pt", "--json", "OUT"], ["lone.pt"]),
    "plot run": (["plot", "run", "run", "log.jsonl", "--csv", "OUT"],
                 ["run/train.jsonl", "run/averaged.pt", "log.jsonl"]),
    "diagnose": (["diagnose", "run/data-bin", "--path", "lone.pt", "--json", "OUT"],
                 ["lone.pt", "run/data-bin/dict.en.txt"]),
    "diagnose flags": (["diagnose", "run/data-bin", "--arch", "dlcl --init-from=lone.pt", "--encoder-embed-path",
                        "in.txt", "--json", "OUT"], ["lone.pt", "in.txt"]),
    "report": (["report", "run", "--generate-output", "gen.txt", "--output", "OUT"],
               [*RUN, "run/test.hyp.de", "run/RESULT.json", "gen.txt"]),
    "score": (["score", "--sys", "hyp.txt", "--ref", "ref.txt", "--against", "run", "--json", "OUT"],
              ["hyp.txt", "ref.txt", "run/test.hyp.de"]),
    "score generated": (["score", "--generate-output", "gen.txt", "--hypotheses", "OUT"], ["gen.txt"]),
    "score pairs": (["score", "--multilingual", "pairs", "--json", "OUT"], ["pairs/test.en-de.ref"]),
    "average": (["average", "--inputs", "lone.pt", "other.pt", "--output", "OUT"], ["lone.pt", "other.pt"]),
    "average the last": (["average", "--dir", "epochs", "--last", "1", "--output", "OUT"],
                         ["epochs/checkpoint1.pt", "epochs/checkpoint2.pt"]),
    "average packages": (["average", "--inputs", "pkg/model.safetensors", "--output", "OUT"], ["pkg/config.json"]),
    "export": (["export", "lone.pt", "--output", "OUT"], ["lone.pt"]),
    "export run": (["export", "run", "--output", "OUT"], ["run/averaged.pt"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_command_writes_over_its_input(case, place, monkeypatch, capsys):
    """By its own name, by a symbolic link and by a hard link."""
    monkeypatch.chdir(place)
    words, inputs = CASES[case]
    for name in inputs:
        Path("link").symlink_to(name)
        os.link(name, "hard")
        for output in (name, "link", "hard", os.path.abspath(name)):
            status = main.main([output if word == "OUT" else word for word in words])
            told = capsys.readouterr().err
            assert status == 2 and told.count("\n") == 1, told
            assert f"cannot write {output}: it is an input" in told
            assert Path(name).read_text() == "{}\n"
        os.remove("link")
        os.remove("hard")


def test_standard_input_is_an_input(place, monkeypatch):
    """A file that the shell has opened for the command."""
    monkeypatch.chdir(place)
    words = ["score", "--sys", "-", "--ref", "ref.txt", "--json", "in.txt"]
    with open("in.txt") as stream:
        done = subprocess.run([*COMMAND, *words], stdin=stream, env={**os.environ, **TOLD}, capture_output=True)
    assert done.returncode == 2 and b"cannot write in.txt: it is an input (standard input)" in done.stderr
    assert Path("in.txt").read_text() == "{}\n"


def test_new_files_and_what_the_command_wrote_itself_are_no_inputs(place):
    (place / "run/report.html").touch()
    check_outputs([str(place / "run/report.html"), str(place / "run/new.json")], [str(place / "run")], ["report.html"])
    (place / "run/data-bin/up").symlink_to(place / "run")  # a loop
    with pytest.raises(UsageError, match="it is an input"):
        check_outputs([str(place / "run/report.html")], [str(place / "run")])
    with pytest.raises(UsageError, match="is the same file"):
        check_outputs([str(place / "a"), str(place / "run/../a")], [])


@pytest.mark.parametrize(
    "redirection, status, told",
    [
        (">/dev/full", 2, "cannot write to standard output: No space left on device"),
        (">&-", 2, "standard output is closed; redirect it to a file or to /dev/null"),
        ("<&- >/dev/null", 0, ""),
        ("2>&- >/dev/null", 0, ""),
        ("2>/dev/full >/dev/null", 0, ""),
        ("| :; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
@pytest.mark.parametrize("words", ["path", "average --help"])
def test_closed_and_full_streams(redirection, status, told, words):
    command = f"{' '.join(COMMAND)} {words} {redirection}"
    environment = {**os.environ, **TOLD, "PYTHONUNBUFFERED": "1" if words == "path" else ""}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == status and len(lines) <= 1 and (told in done.stderr if told else not lines), done.stderr


@pytest.mark.parametrize("words", [["translate", "lone.pt"], ["translate", "lone.pt", "--line-by-line"],
                                   ["score", "--sys", "-", "--ref", "ref.txt"]])  # fmt: skip
@pytest.mark.parametrize("closed", [True, False])
def test_standard_input_that_cannot_be_read(words, closed, place, monkeypatch, capsys):
    """Closed by the caller, so that Python has none, or opened for writing only."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("fairseq_deep.tools.translate.load", lambda *_: SimpleNamespace())
    with open("w", "wb") as stream:
        unreadable = io.TextIOWrapper(io.BufferedReader(io.FileIO(os.dup(stream.fileno()), "rb")))
    monkeypatch.setattr(sys, "stdin", None if closed else unreadable)
    assert main.main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and ("standard input is closed" if closed else "Bad file descriptor") in told, told
    assert "standard output" not in told


def test_a_file_that_cannot_be_accessed_is_one_line(monkeypatch, capsys):
    def run(_):
        os.listdir("no\nsuch")

    monkeypatch.setattr("fairseq_deep.tools.path.run", run)
    assert main.main(["path"]) == 2
    assert capsys.readouterr().err == "fairseq-deep path: cannot access no\\nsuch: No such file or directory\n"


def begin(tmp_path, finish, *launcher):
    """Start a command that is writing its output; *finish* is what it does then."""
    code = "import sys, time; sys.modules['fairseq'] = None  # which takes seconds\n"
    code += "from fairseq_deep.tools import main, path, new_folder, replacing\n"
    code += "def run(args):\n    with replacing('out') as a, open(a, 'w'), new_folder('dir'):\n"
    code += "        open('begun', 'w').close(); " + finish + "\n"
    code += "    return 0\npath.run = run; sys.exit(main.main(['path']))"
    command = [*launcher, sys.executable, "-c", code]
    told = {"cwd": tmp_path, "env": {**os.environ, **TOLD}}
    # the tests themselves may have been started by nohup, whose programs ignore SIGHUP
    process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **told)
    end = time.time() + 60
    while not (tmp_path / "begun").exists() and time.time() < end:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_temporary_file(number, tmp_path):
    """A command that is writing its output when the signal comes."""
    process = begin(tmp_path, "time.sleep(60)")
    process.send_signal(number)
    assert process.wait(30) == -number
    assert os.listdir(tmp_path) == ["begun"]


def test_a_second_signal_does_not_end_the_removal(tmp_path):
    """systemd can send SIGHUP right after SIGTERM."""
    finish = "import os, shutil; rmtree = shutil.rmtree; shutil.rmtree = lambda *a, **b: " \
        "(os.kill(os.getpid(), 1), rmtree(*a, **b)); os.kill(os.getpid(), 15)"
    assert begin(tmp_path, finish).wait(30) == -signal.SIGTERM
    assert os.listdir(tmp_path) == ["begun"]


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path):
    process = begin(tmp_path, "time.sleep(2)", "nohup")
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0
    assert sorted(os.listdir(tmp_path)) == ["begun", "dir", "out"]


@pytest.mark.parametrize("given", ["in.txt", "-"])
@pytest.mark.parametrize("output", ["out.txt", "-"])
def test_an_empty_file_is_translated_like_empty_stdin(given, output, place, monkeypatch, capsys):
    """The model is not asked: it has nothing but an engine that has translated nothing."""
    nothing = SimpleNamespace(engine=SimpleNamespace(by_torch=0), unknown=0, tokens=0)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("fairseq_deep.tools.translate.load", lambda *_: nothing)
    Path("in.txt").write_text("")
    assert main.main(["translate", "lone.pt", "--input", given, "--output", output]) == 0
    assert tuple(capsys.readouterr()) == ("", "")
    assert output == "-" or Path(output).read_text() == ""


def test_messages_show_no_control_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "a\n\x1b[31mb\u202e\u2028c"
    assert main.main(["average", "--inputs", name, "--output", "x"]) == 2
    assert capsys.readouterr().err == (
        "fairseq-deep average: a \\x1b[31mb\\u202e c: no such checkpoint; correct the path\n"
    )
    assert printable("\x9b\ud800é" + "x" * 300, 20) == "\\x9b\\ud800éxxxxxx..."


def test_commands_of_fairseq_show_no_control_characters():
    """The build's own module, whichever fairseq is installed."""
    folder = ROOT / "third_party/fairseq"
    safe_exit = runpy.run_path(str(folder / "safe_exit.py"))

    @safe_exit["command"]
    def command():
        raise safe_exit["OneLineError"]("refused é\n\x1b[31mb\u202e\ud800")

    with pytest.raises(SystemExit) as end:
        command()
    assert end.value.code == "refused é \\x1b[31mb\\u202e\\ud800"
