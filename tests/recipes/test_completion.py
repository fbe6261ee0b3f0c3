"""``fairseq-deep completion``: the script for bash is run in a bash; those for other shells are only written."""

import subprocess
import sys

import pytest

from fairseq_deep import list_archs
from fairseq_deep.recipes.recipe import Recipe
from fairseq_deep.tools.main import COMMANDS, main, name_of
from tests.helpers.commands import run
from tests.helpers.paths import ROOT

ASK = """source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
$(complete -p "${2##*/}" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(run("fairseq-deep", "completion", "bash", cwd=ROOT).stdout)
    return path


def complete(script, *words, cwd=ROOT):
    """What bash offers for the last word."""
    command = ["bash", "-c", ASK, "bash", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, timeout=60)
    return done.stdout.split()


def test_the_script_is_good_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words, offered", [
    (["fairseq-deep", "rec"], ["recipe"]),
    (["fairseq-deep", "recipe", "own"], ["own_text"]),
    (["fairseq-deep", "recipe", "own_text", "--batch"], ["--batch-tokens"]),
    (["fairseq-deep", "recipe", "own_text", "--beam", "5", "--precision", ""], ["fp32", "fp16", "bf16", "amp"]),
    (["fairseq-deep", "recipe", "own_text", "--smoke", ""], ["true", "false"]),
    (["fairseq-deep", "recipe", "own_text", "--sour"], []),
    (["fairseq-deep", "compare", "--sour"], ["--source-lang"]),
    (["fairseq-deep", "plot", "wei"], ["weights"]),
    (["fairseq-deep", "translate", "--decode-p"], ["--decode-precision"]),
    (["fairseq-deep", "completion", ""], ["bash", "zsh", "tcsh"]),
    (["./run_wmt16_ende.sh", "--precision", "b"], ["bf16"]),
    (["run_wmt16_ende.sh", "--lenp"], ["--lenpen"]),
])  # fmt: skip
def test_bash_completes(script, words, offered):
    assert complete(script, *words) == offered


def test_bash_completes_every_command_and_architecture(script):
    names = {name_of(module) for module in COMMANDS}
    assert set(complete(script, "fairseq-deep", "")) == names
    for words in (["recipe", "own_text", "--arch"], ["compare", "--jobs", "2"], ["archs"], ["diagnose", "--arch"]):
        offered = complete(script, "fairseq-deep", *words, "transformer_dlcl_3")
        assert len(offered) > 2 and offered == list_archs("transformer_dlcl_3*"), words
    shown = {f"--{name.replace('_', '-')}" for name, each in Recipe.declared().items() if each.metadata["help"]}
    assert set(complete(script, "fairseq-deep", "recipe", "own_text", "--")) == {"--help", *shown}


def test_bash_completes_paths(script, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run.pt").touch()
    for words in (["recipe", "own_text", "--data"], ["average", "--dir"], ["compare", "--exp"]):
        assert complete(script, "fairseq-deep", *words, "ru", cwd=tmp_path) == ["runs"], words
    for words in (["recipe", "own_text", "--against"], ["average", "--inputs"], ["translate"]):
        assert sorted(complete(script, "fairseq-deep", *words, "ru", cwd=tmp_path)) == ["run.pt", "runs"], words


@pytest.mark.parametrize("shell, start", [("zsh", "#compdef fairseq-deep"), ("tcsh", "# AUTOMATICALLY GENERATED")])
def test_scripts_of_other_shells_are_written(shell, start, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text.startswith(start) and "own_text" in text and "batch-tokens" in text


def test_without_shtab_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.endswith(": pip install shtab\n") and captured.out == ""


def test_without_fairseq_no_architectures_are_offered(monkeypatch, capsys):
    def missing():
        raise ImportError

    monkeypatch.setattr("fairseq_deep.list_archs", missing)
    assert main(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    assert "transformer_dlcl_30l" not in text and "--precision" in text
