"""The command itself: its streams, its signals, what it tells of an error, and how it writes files."""

import errno
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fairseq_deep
from fairseq_deep import cli
from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools.output_files import check_outputs
from tests.helpers.paths import ROOT
from tests.helpers.processes import until

PROGRAM = "import sys; sys.modules['fairseq'] = None; from fairseq_deep.cli import main; sys.exit(main(sys.argv[1:]))"
COMMAND = [sys.executable, "-c", PROGRAM]  # as importing fairseq takes seconds
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
PLACE = os.path.abspath(fairseq_deep.__path__[0]) + "\n"


def test_path_and_doctor_run_where_fairseq_is_broken(tmp_path):
    """And ``path`` prints the folder, and nothing else."""
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq/__init__.py").write_text("raise ImportError('broken on purpose')\n")
    environment = {**QUIET, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    path, doctor = (subprocess.run([sys.executable, "-m", "fairseq_deep", name], env=environment, capture_output=True,
                                   text=True) for name in ("path", "doctor"))  # fmt: skip
    assert (path.returncode, path.stdout) == (0, PLACE)
    assert doctor.returncode == 1 and "broken on purpose" in doctor.stdout and "Traceback" not in doctor.stderr
    assert "Training does not work here: fairseq" in doctor.stdout


@pytest.mark.parametrize("words, status, out, error", [
    (["--version"], 0, f"fairseq_deep {fairseq_deep.__version__}\n", ""),
    ([], 2, "", "average"),
    (["avrage"], 2, "", "fairseq-deep: unknown command 'avrage' (did you mean average?)"),
])  # fmt: skip
def test_without_a_command(words, status, out, error, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (status, out) and error in captured.err
    assert words != ["avrage"] or captured.err.count("\n") == 1


def test_the_help_groups_all_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    groups = [group.splitlines() for group in capsys.readouterr().out.partition("train:\n")[2].split("\n\n")]
    assert [head for head, *_ in groups[1:]] == ["use:", "convert:", "inspect:"]
    listed = dict(line.strip().split(maxsplit=1) for group in groups for line in group if line.startswith("  "))
    assert listed.keys() == cli.COMMANDS.keys() and listed["translate"] == "translate raw text with a trained model"


def test_tab_completion_has_the_options_of_all_commands():
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(cli.whole_parser(), "bash")
    found = dict(re.findall(r"^_shtab_fairseq_deep_(\w+?)_option_strings=\((.*)\)$", script, re.MULTILINE))
    assert found.keys() >= cli.COMMANDS.keys()
    options = {"recipe": "--stop-stage", "compare": "--tune-updates", "translate": "--lenpen", "path": "--help"}
    assert {name: option for name, option in options.items() if option not in found[name].split()} == {}


@pytest.mark.parametrize("raised, status, told", [
    (UsageError("first\nsecond"), 2, "first second"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, "Cannot allocate memory"),
    (FileNotFoundError(2, "No such file or directory", "no\nsuch"), 2, "cannot access no\\nsuch: No such file or "
     "directory"),
    (KeyboardInterrupt(), 130, "interrupted"),
], ids=repr)  # fmt: skip
def test_an_error_is_one_line(raised, status, told, monkeypatch, command):
    """Which does not blame standard output."""

    def run(_):
        raise raised

    monkeypatch.setattr("fairseq_deep.tools.path.run", run)
    assert command("path") == (status, "", f"fairseq-deep path: {told}\n")


def test_messages_show_no_control_characters(command):
    code, _, error = command("average", "--inputs", "a\n\x1b[31mb\u202e\u2028c", "--output", "x")
    assert (code, error) == (
        2, "fairseq-deep average: a \\x1b[31mb\\u202e c: no such checkpoint; correct the path\n"
    )  # fmt: skip
    assert printable("\x9b\ud800é" + "x" * 300, 20) == "\\x9b\\ud800éxxxxxx..."
    safe_exit = runpy.run_path(str(ROOT / "third_party/fairseq/safe_exit.py"))  # of our build, whichever is installed

    @safe_exit["command"]
    def fails():
        raise safe_exit["OneLineError"]("refused é\n\x1b[31mb\u202e\ud800")

    with pytest.raises(SystemExit) as end:
        fails()
    assert end.value.code == "refused é \\x1b[31mb\\u202e\\ud800"


def test_new_files_and_what_the_command_wrote_itself_are_no_inputs(tmp_path):
    (tmp_path / "run/data").mkdir(parents=True)
    own, new = tmp_path / "run/report.html", tmp_path / "run/new.json"
    own.touch()
    check_outputs([str(own), str(new)], [str(tmp_path / "run")], ["report.html"])
    (tmp_path / "run/data/up").symlink_to(tmp_path / "run")  # a loop
    with pytest.raises(UsageError, match="it is an input"):
        check_outputs([str(own)], [str(tmp_path / "run")])


def test_standard_input_is_an_input(tmp_path):
    """A file that the shell has opened for the command."""
    for name in ("in.txt", "ref.txt"):
        (tmp_path / name).write_text("{}\n")
    words = ["score", "--sys", "-", "--ref", "ref.txt", "--json", "in.txt"]
    with open(tmp_path / "in.txt") as stream:
        done = subprocess.run([*COMMAND, *words], stdin=stream, env=QUIET, capture_output=True, cwd=tmp_path)
    assert done.returncode == 2 and b"cannot write in.txt: it is an input (standard input)" in done.stderr
    assert (tmp_path / "in.txt").read_text() == "{}\n"


@pytest.mark.parametrize("words, redirection, status, told", [
    *((words, ">/dev/full", 2, "cannot write to standard output: No space left on device")
      for words in ("path", "average --help")),
    ("path", ">&-", 2, "standard output is closed; redirect it to a file or to /dev/null"),
    ("path", "<&- 2>&- >/dev/null", 0, ""), ("path", "2>/dev/full >/dev/null", 0, ""),
    ("average --help", "| :; exit ${PIPESTATUS[0]}", 141, ""),
])  # fmt: skip
def test_closed_and_full_streams(words, redirection, status, told):
    environment = {**QUIET, "PYTHONUNBUFFERED": "1" if words == "path" else ""}
    done = subprocess.run(["bash", "-c", f"{shlex.join(COMMAND)} {words} {redirection}"], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == status and len(lines) <= 1 and (told in done.stderr if told else not lines), done.stderr


def test_closed_streams_are_reopened():
    """Otherwise the next file that is opened would be standard input, or receive the errors."""
    program = "import os, sys; sys.modules['fairseq'] = None; from fairseq_deep.cli import open_streams; "
    program += "open_streams(); print(os.open(os.devnull, os.O_RDONLY))"
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program]
    assert int(subprocess.run(command, env=QUIET, capture_output=True, text=True).stdout) > 2


@pytest.fixture
def lone(tmp_path, monkeypatch):
    """The names of a checkpoint and texts, and a model that is not asked."""
    monkeypatch.chdir(tmp_path)
    for name in ("lone.pt", "ref.txt", "in.txt"):
        Path(name).write_text("" if name == "in.txt" else "{}\n")
    nothing = SimpleNamespace(unknown=0, tokens=0, text=SimpleNamespace(doubt="", kind=""))
    monkeypatch.setattr("fairseq_deep.tools.translate.load", lambda *_: nothing)


@pytest.mark.parametrize("words", [["translate", "lone.pt"], ["translate", "lone.pt", "--line-by-line"],
                                   ["score", "--sys", "-", "--ref", "ref.txt"]], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("closed", [True, False])
def test_standard_input_that_cannot_be_read(words, closed, lone, monkeypatch, command):
    """Closed by the caller, so that Python has none, or opened for writing only."""
    with open("w", "wb") as stream:
        unreadable = io.TextIOWrapper(io.BufferedReader(io.FileIO(os.dup(stream.fileno()), "rb")))
    monkeypatch.setattr(sys, "stdin", None if closed else unreadable)
    code, _, error = command(*words)
    assert code == 2 and error.count("\n") == 1 and "standard output" not in error
    assert ("standard input is closed" if closed else "Bad file descriptor") in error


@pytest.mark.parametrize("given", ["in.txt", "-"])
@pytest.mark.parametrize("output", ["out.txt", "-"])
def test_an_empty_text_is_translated_into_an_empty_one(given, output, lone, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    assert command("translate", "lone.pt", "--input", given, "--output", output) == (0, "", "")
    assert output == "-" or Path(output).read_text() == ""


def begin(tmp_path, finish, *launcher):
    """Start a command that is writing its output; *finish* is what it does then."""
    code = "import sys, time; sys.modules['fairseq'] = None  # which takes seconds\n"
    code += "from fairseq_deep import cli\nfrom fairseq_deep.tools import path\n"
    code += "from fairseq_deep.tools.output_files import new_folder, replacing\n"
    code += "def run(args):\n    with replacing('out') as a, open(a, 'w'), new_folder('dir'):\n"
    code += "        open('begun', 'w').close(); " + finish + "\n"
    code += "    return 0\npath.run = run; sys.exit(cli.main(['path']))"
    # the tests themselves may have been started by nohup, whose programs ignore SIGHUP
    process = subprocess.Popen([*launcher, sys.executable, "-c", code], cwd=tmp_path, env=QUIET,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # fmt: skip
    until((tmp_path / "begun").exists)
    return process


SECOND = "import os, shutil; rmtree = shutil.rmtree; shutil.rmtree = lambda *a, **b: " \
    "(os.kill(os.getpid(), 1), rmtree(*a, **b)); os.kill(os.getpid(), 15)"  # fmt: skip


@pytest.mark.parametrize("number, finish", [
    (signal.SIGTERM, "time.sleep(60)"), (signal.SIGHUP, "time.sleep(60)"), (signal.SIGTERM, SECOND),
], ids=["SIGTERM", "SIGHUP", "SIGHUP during the removal"])  # fmt: skip
def test_a_signal_leaves_no_temporary_file(number, finish, tmp_path):
    process = begin(tmp_path, finish)
    if finish != SECOND:
        process.send_signal(number)
    assert process.wait(30) == -number
    assert os.listdir(tmp_path) == ["begun"]


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path):
    process = begin(tmp_path, "time.sleep(2)", "nohup")
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0
    assert sorted(os.listdir(tmp_path)) == ["begun", "dir", "out"]
