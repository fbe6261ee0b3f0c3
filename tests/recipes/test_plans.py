"""Command lines of recipes and comparisons that print a plan (plans.txt) or are refused (tests/errors/recipes.txt).

Nothing is written.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.errors import ROW, assert_says, rows
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked, write_pairs, write_program

SCRIPTS = {"recipe": MAIN, **{name: ROOT / f"examples/{name}/run.sh" for name in ("compare", "opus100", "own_text")}}
COMPARE = {"--data": "text", "--exp": "exp", "--ngpu": "0", "--width": "16", "--updates": "4"}
PLANS = re.findall(ROW, Path(__file__).with_name("plans.txt").read_text())


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """ended(before, command, fixed, WORD, ...): a command after lines for bash; *fixed*: options of compare."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue"):
        write_program(tmp_path / "bin" / name, "")  # it accepts everything
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_pairs(tmp_path / "text", **dict.fromkeys(("train", "valid", "test"), [("the house", "das Haus")]))

    def ended(before, command, fixed, *first):
        subprocess.run(["bash", "-ec", before], check=True)
        found = sorted(tmp_path.rglob("*"))
        name, *words = shlex.split(command)
        given = {**COMPARE, **fixed} if name == "compare" else {"--ngpu": "8"}
        more = [word for flag in given if flag not in words for word in (flag, given[flag])]
        done = checked(SCRIPTS[name], *first, *more, *words)
        assert sorted(tmp_path.rglob("*")) == found
        return done

    return ended


@pytest.mark.parametrize("before, command, said", rows("recipes"))
def test_an_experiment_is_refused_in_one_line(before, command, said, ended):
    done = ended(before, command, {})
    name = f"fairseq-deep {done.args[0]}: "
    assert done.returncode == 2 and done.stderr.startswith(name), done
    assert_says(done.stderr.removeprefix(name), said)


@pytest.mark.parametrize("before, command, lines", [pytest.param(*row, id=row[1][:80]) for row in PLANS])
def test_a_plan_has_its_lines(before, command, lines, ended):
    fixed = {"--conf": "mini", "--seeds": "1", "--heads": "2"}
    done = ended(before.replace("$ ", ""), command, fixed, "--dry-run", "--exp", "exp")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for line in map(str.strip, lines.splitlines()):
        pattern = ".*".join(map(re.escape, line.removeprefix("no ").split("...")))
        assert bool(re.search(f"(?m)^{pattern}$", done.stdout)) != line.startswith("no "), f"{line}\n{done.stdout}"
