"""Options of recipes and comparisons that are refused before anything is written: recipes.txt."""

import os
import shlex
import subprocess

import pytest

from tests.errors import assert_says, rows
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked, write_pairs, write_program

SCRIPTS = {"recipe": MAIN, **{name: ROOT / f"examples/{name}/run.sh" for name in ("compare", "opus100")}}
COMPARE = {"--data": "text", "--exp": "exp", "--ngpu": "0", "--width": "16", "--updates": "4"}


@pytest.mark.parametrize("before, command, said", rows("recipes"))
def test_an_experiment_is_refused_in_one_line(before, command, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue"):
        write_program(tmp_path / "bin" / name, "")  # it accepts everything
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_pairs(tmp_path / "text", **dict.fromkeys(("train", "valid", "test"), [("the house", "das Haus")]))
    subprocess.run(["bash", "-c", before], check=True)
    found = sorted(tmp_path.rglob("*"))
    name, *words = shlex.split(command)
    given = COMPARE if name == "compare" else {"--ngpu": "8"}
    fixed = [word for flag in given if flag not in words for word in (flag, given[flag])]
    done = checked(SCRIPTS[name], *fixed, *words)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done
    assert_says(done.stderr.removeprefix("error: "), said)
    assert sorted(tmp_path.rglob("*")) == found
