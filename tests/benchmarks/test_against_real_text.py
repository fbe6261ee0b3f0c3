"""benchmarks/against_ctranslate2.py from the command line: systems in processes of their own, on real text."""

import sys

from tests.helpers.commands import run, train_command
from tests.helpers.paths import ROOT

SCRIPT = ROOT / "benchmarks/against_ctranslate2.py"
SYSTEMS = ["stock", "ours", "other-int8"]


def table(printed):
    """{system: the other cells of its row}"""
    rows = [line.split() for line in printed.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] in SYSTEMS}


def test_a_checkpoint_on_a_subset(data, tmp_path):
    run(*train_command(data, tmp_path, "--max-update", "8", arch="transformer_prenorm_2l2l_tiny"))
    checkpoint = tmp_path / "checkpoint_last.pt"
    flags = ("--checkpoint", checkpoint, "--also", f"other={checkpoint}")
    flags += ("--max-len-b", "4", "--batch-size", "8", "--rounds", "1", "--systems", *SYSTEMS)
    done = run(sys.executable, SCRIPT, "--data", data, *flags)
    assert "cores" in done.stdout and "threads: 1" in done.stdout
    rows = table(done.stdout)
    assert list(rows) == SYSTEMS
    stock, ours = rows["stock"], rows["ours"]
    assert stock[3] == "1.000" and stock[5] == ours[5] == "100.0%" and stock[6] == ours[6]
    assert rows["other-int8"][5] == "-"


def test_a_system_that_cannot_be_built_ends_the_run_in_one_line(data, tmp_path):
    done = run(sys.executable, SCRIPT, "--data", data, "--checkpoint", tmp_path / "missing.pt", check=False)
    assert done.returncode == 1 and "missing.pt" in done.stderr and "Traceback" not in done.stderr
