"""The options of the recipes: what no plan of plans.txt or tests/snapshots shows, and which of them train the same."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from fairseq import options

from fairseq_deep.cli import main
from fairseq_deep.recipes import changes, commands, driver, scripts
from fairseq_deep.recipes.plan import Plan
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked, write_program


def run(*words):
    """The ended dry run on a machine with 8 GPUs, in this process."""
    return checked(MAIN, "--dry-run", "--ngpu", "8", *words)


def test_the_commands_have_help_and_name_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_DEEP_ENV", "current")
    assert main(["recipe", "--help"]) == 0 and "TASK: depthwise_lstm, " in capsys.readouterr().out
    assert main(["compare", "--help"]) == 0 and "--halves" in capsys.readouterr().out
    rows = [(["recipe", "wmt16_endd"], "unknown recipe wmt16_endd (did you mean wmt16_ende?)"),
            (["compare", "prenorm_6l"], "--data is missing")]  # fmt: skip
    for line, problem in rows:
        assert main(line) == 2 and problem in capsys.readouterr().err
    monkeypatch.setattr(commands, "EXAMPLES", str(tmp_path / "examples"))
    for line in (["recipe", "wmt16_ende"], ["compare", "dlcl_6l"]):
        said = f"fairseq-deep {line[0]}: no recipes in {tmp_path}/examples; run this in a clone of the repository\n"
        assert (main(line), capsys.readouterr().err) == (2, said)


def test_every_file_that_decides_what_is_installed_changes_the_stamp(tmp_path):
    names = ["requirements.txt", "constraints.txt", "pyproject.toml"]
    built = ("backend.py", "patches/4-text.patch", "safe_load.py", "pyproject.toml")
    names += [f"third_party/fairseq/{name}" for name in built]
    (tmp_path / "third_party/fairseq/patches").mkdir(parents=True)
    stamps = set()
    for name in ["", *names]:
        for other in names:
            (tmp_path / other).write_text("changed" if other == name else "as before")
        script = f". '{ROOT}/examples/common/env.sh'; env_stamp '{tmp_path}'"
        stamps.add(subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout)
    assert len(stamps) == len(names) + 1


@pytest.mark.parametrize("change, said", [
    ({}, ""),
    ({"fairseq.py": "raise ImportError"}, "bin/python cannot import fairseq; run: "),
    ({"fairseq_deep/__init__.py": "raise ImportError"}, "bin/python cannot import fairseq_deep; run: "),
    ({"fairseq_deep/new.py": ""}, "which differs from"),
])  # fmt: skip
def test_the_environment_of_the_user_is_checked_once(tmp_path, change, said):
    """And not again by a script that this one calls. The clone in the working directory is not what commands import."""
    program, ensure = tmp_path / "bin/python", (ROOT / "examples/common/env.sh").read_text()
    files = {"fairseq.py": "", "fairseq_deep/__init__.py": "", "root/fairseq_deep/__init__.py": "", "bin/python": "",
             "root/examples/common/env.sh": ensure, **change}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    write_program(program, f'echo call >> {tmp_path}/calls\nexec {sys.executable} "$@"')
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "FAIRSEQ_DEEP_ENV": "current", "PATH": path, "PYTHONPATH": str(tmp_path)}
    once = f". '{tmp_path}/root/examples/common/env.sh'; ensure_env"
    script = f'{once} && bash -c "{once}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment,
                          cwd=tmp_path / "root")  # fmt: skip
    assert done.returncode == bool(change) and said in done.stderr and done.stderr.count("\n") == bool(change)
    assert (tmp_path / "calls").read_text().count("call") == 1


def test_a_script_runs_in_any_directory_and_names_a_missing_python(tmp_path):
    folder, programs = tmp_path / "odd $folder 'x'", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (tmp_path / "examples").mkdir()
    given = {"capture_output": True, "text": True, "cwd": folder, "timeout": 300}
    words = [MAIN, "--dry-run", "--ngpu", "8", "--exp", "my exp"]
    done = subprocess.run(words, env={**os.environ, "CDPATH": f"{tmp_path}:."}, **given)
    assert done.stderr == "" and os.listdir(folder) == []
    assert shlex.join(["--save-dir", str(folder / "my exp/checkpoints")]) in done.stdout
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name))
    done = subprocess.run(words, env={"PATH": str(programs), "FAIRSEQ_DEEP_ENV": "current"}, **given)
    assert (done.returncode, done.stderr) == (1, "set-up: no python in PATH; activate an environment\n")
    done = subprocess.run(words, env={"PATH": str(programs), "FAIRSEQ_DEEP_ENV": "none"}, **given)
    assert (done.returncode, done.stderr) == (1, "set-up: FAIRSEQ_DEEP_ENV must be current, not 'none', or unset\n")


def test_a_run_starts_from_another_one(tmp_path):
    other, exp = tmp_path / "other", tmp_path / "exp folder"
    (other / "checkpoints").mkdir(parents=True)
    last = other / "checkpoints/checkpoint_last.pt"
    last.touch()
    (other / "cmd.sh").touch()
    given = ["--exp", str(exp), "--ngpu", "8"]
    started = [*given, "--start-from", str(other)]
    own = Plan(driver.read_options("wmt16_ende", given)).resolve().keys
    (other / ".done.3").write_text(own[3] + "\n")
    keys = Plan(driver.read_options("wmt16_ende", started)).resolve().keys
    assert [one == another for one, another in zip(own, keys)] == [True] * 4 + [False] * 4, "another training"
    assert "stages before 4 would change that run's text" in run(*started, "--stage", "2").stderr
    for words, task in (([], "translation"), (["--", "--robt"], "deep_translation")):
        done = run(*started, *words).stdout
        assert f"--finetune-from-model {last}" in done and f"--task {task} " in done


def test_another_teacher_translates_anew(tmp_path):
    """Also one in the same place."""
    best, keys = tmp_path / "teacher/checkpoints/checkpoint_best.pt", []
    best.parent.mkdir(parents=True)
    for content in ("one", "another"):
        best.write_text(content)
        words = ["--exp", str(tmp_path / "exp"), "--ngpu", "0", "--demo", "--teacher", str(tmp_path / "teacher")]
        keys.append(Plan(driver.read_options("wmt16_ende", words)).resolve().keys[1])
    assert keys[0] != keys[1]


def test_scripts_export_the_mirror_of_the_text(monkeypatch):
    """Another address of the text is other text, so a script without it would not resume the run."""
    monkeypatch.setenv("WMT_URL", "file:///some where")
    assert "export 'WMT_URL=file:///some where'" in scripts._environment()


BASE = "fairseq-train DATA --arch a --lr 0.1 --adam-betas '(0.9, 0.98)' --fp16 --clip-norm -1 --max-epoch 3"


@pytest.mark.parametrize("other, named", [
    (BASE.replace("DATA", "ELSEWHERE"), ""), (BASE.replace("--max-epoch 3", "--max-epoch 9 --max-update 7"), ""),
    (BASE.replace("--lr 0.1", "--lr 0.5 --lr=0.1"), ""), (f"{BASE} --num-workers 4 --save-interval-updates 3", ""),
    (f"{BASE} --lr=0.2 --arch b", "--arch a, now --arch b; --lr 0.1, now --lr 0.2"),
    (f"{BASE} --seed 7", "without --seed, now --seed 7"), (BASE.replace("--fp16", ""), "--fp16, now without --fp16"),
    (BASE.replace("-1", "-2"), "--clip-norm -1, now --clip-norm -2"),
    (BASE.replace("0.98", "0.99"), "--adam-betas (0.9, 0.98), now --adam-betas (0.9, 0.99)"),
    (f"{BASE} --lr-scheduler inverse_sqrt_cooldown --max-update 7",
     "without --lr-scheduler, now --lr-scheduler inverse_sqrt_cooldown; without --max-update, now --max-update 7"),
])  # fmt: skip
def test_difference_of_two_trainings(other, named):
    assert changes.difference(shlex.split(BASE), shlex.split(other)) == named


def test_flags_that_do_not_count_are_fairseqs():
    """A misspelt one would let nothing through that it should, and nobody would see it."""
    own = {"--compile", "--log-depth-interval", "--checkpoint-activations"}  # of our models
    assert set(changes.FREE) - {*options.get_training_parser()._option_string_actions} <= own
