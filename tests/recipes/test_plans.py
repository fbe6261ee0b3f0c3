"""Plans of recipes and comparisons: plans.txt has commands with lines of their dry runs."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked, write_pairs

SCRIPTS = {"recipe": MAIN, **{name: ROOT / f"examples/{name}/run.sh" for name in ("compare", "own_text")}}
COMPARE = "--data text --ngpu 0 --conf mini --seeds 1 --updates 4 --width 16 --heads 2"
ROWS = re.findall(r"(?m)^((?:\$ .*\n)*)([^#$\s].*)\n((?: {4}.*\n)+)", Path(__file__).with_name("plans.txt").read_text())


@pytest.mark.parametrize("before, command, lines", [pytest.param(*row, id=row[1][:80]) for row in ROWS])
def test_a_plan_has_its_lines_and_writes_nothing(before, command, lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "text", **dict.fromkeys(("train", "valid", "test"), [("the house", "das Haus")]))
    subprocess.run(["bash", "-ec", before.replace("$ ", "")], check=True)
    found = sorted(tmp_path.rglob("*"))
    name, *words = shlex.split(command)
    fixed = dict(zip(*[iter(shlex.split(COMPARE if name == "compare" else "--ngpu 8"))] * 2))
    given = [word for flag in fixed if flag not in words for word in (flag, fixed[flag])]
    done = checked(SCRIPTS[name], "--dry-run", "--exp", "exp", *given, *words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for line in map(str.strip, lines.splitlines()):
        pattern = ".*".join(map(re.escape, line.removeprefix("no ").split("...")))
        assert bool(re.search(f"(?m)^{pattern}$", done.stdout)) != line.startswith("no "), f"{line}\n{done.stdout}"
    assert sorted(tmp_path.rglob("*")) == found
