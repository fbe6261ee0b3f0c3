"""The recipe with several seeds, averages by updates, and the text of another run."""

import json
import os
import re
import signal
import subprocess

import pytest

from fairseq_deep.recipes import summary
from fairseq_deep.tools.results import read
from tests.helpers import recipes
from tests.helpers.processes import live
from tests.helpers.recipes import SMALL, assert_refused, programs
from tests.helpers.runs import RECORD, make_run


def test_the_text_of_another_run_is_linked_and_never_changed(job, tmp_path):
    there, exp = tmp_path / "there", tmp_path / "by a link" / "exp"
    (tmp_path / "deep/disk").mkdir(parents=True)
    (tmp_path / "by a link").symlink_to(tmp_path / "deep/disk")
    done = job("--exp", there, "--max-len-b", "0")
    assert done.returncode == 0, done.stderr
    same = ("--exp", exp, "--stop-stage", "3")
    for _ in range(2):
        assert job(*same, "--start-from", there).stdout.count("already done") == 4
    assert all((exp / name).samefile(there / name) for name in ("text", "data-bin"))
    assert_refused(job(*same), "exp has the text of another run: repeat --start-from, or give another")
    (exp / "checkpoints").mkdir()
    (exp / "checkpoints/checkpoint_last.pt").touch()
    assert_refused(
        job("--exp", there, "--start-from", exp), "there has a text of its own: omit --start-from, or give another"
    )


class TestSeeds:
    def test_a_seed_that_fails_leaves_the_others_alone(self, job, tools, stubs, tmp_path):
        exp, failing = tmp_path / "exp with blanks", stubs.with_name(f"{stubs.name}.fail2")
        failing.touch()
        fail = 'if [[ -e $CALLS.fail2 && $* == *"--seed 2 "* ]]; then echo "ValueError: planted"; exit 1; fi'
        recipes.write_program(tools / "fairseq-train", f"{fail}\n{recipes.STUB}")
        words = ("--exp", exp, "--seeds", "3")
        done = job(*words)
        reason = "1 of 3 runs failed (seed 2: stage 4 (train) failed: ValueError: planted, see "
        assert_refused(done, reason, "blanks/seed2/logs); fix the problem, then resume: ", "blanks/resume.sh", status=1)
        assert re.findall(r"(?m)^fairseq-train .*--seed (\d+)", stubs.read_text()) == ["1", "3"]
        assert programs(stubs).count("fairseq-preprocess") == 1
        assert re.search(r"^  2 +FAILED", done.stdout, re.MULTILINE)
        assert done.stdout.splitlines()[-1] == "BLEU = 12.34"
        record = json.loads((exp / "RESULT.json").read_text())
        assert (record["seeds"], record["failed"], sorted(record["runs"])) == ([1, 3], [2], ["1", "3"])
        assert record["bleu"] == {"mean": 12.34, "std": 0.0, "min": 12.34, "max": 12.34}
        failing.unlink()
        done = job(*words)
        assert done.returncode == 0 and done.stderr == ""
        assert programs(stubs).count("fairseq-train") == 1
        assert json.loads((exp / "RESULT.json").read_text())["seeds"] == [1, 2, 3]
        assert sorted((run["seed"], run["folder"]) for run in read(str(exp))) == [(n, f"seed{n}") for n in (1, 2, 3)]
        assert (exp / "seed2/data-bin").samefile(exp / "data-bin") and not (exp / "checkpoints").exists()

    def test_without_translations_there_are_losses(self, job, tools, tmp_path):
        valid = '| INFO | valid | {"epoch": 1, "valid_loss": "2", "valid_ppl": "4.5", "valid_num_updates": "4"}'
        recipes.write_program(tools / "fairseq-train", f"echo '{valid}'\n{recipes.STUB}")
        done = job("--seeds", "2", "--subsets", "none")
        assert done.returncode == 0, done.stderr
        assert re.search(r"seed 1: done in .*, valid ppl 4\.50; ", done.stdout) and "BLEU" not in done.stdout
        record = json.loads((tmp_path / "exp/RESULT.json").read_text())
        assert record["valid_ppl"]["mean"] == 4.5 and "bleu" not in record

    def test_ctrl_c_stops_all_seeds(self, tools, stubs, corpus, tmp_path):
        """The script waits for the training; what it is given by relative names, resume.sh finds from elsewhere."""
        hang = stubs.with_name(stubs.name + ".hang")
        hang.touch()
        command = [recipes.MAIN, "--exp", "exp with blanks", "--data", corpus.name, *SMALL, "--seeds", "2"]
        how = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "cwd": tmp_path}
        child, pid = recipes.begun(command, stubs, **how,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=300)
        assert not live(pid)
        line = r"fairseq-deep recipe: stopped; to resume: .*/exp with blanks.?/resume.sh.?\n"
        assert child.returncode == 130 and re.fullmatch(line, said)
        assert programs(stubs).count("fairseq-train") == 1
        hang.unlink()
        recipes.fork_drivers(tools)
        resume = [str(tmp_path / "exp with blanks/resume.sh")]
        done = subprocess.run(resume, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and programs(stubs).count("fairseq-train") == 2

    @pytest.mark.parametrize("status, reason", [(1, "failed: planted"), (75, "was stopped by a signal")])
    def test_all_seeds_failing_leaves_no_result(self, job, tools, tmp_path, status, reason):
        """A signal to a training alone fails its run."""
        recipes.write_program(tools / "fairseq-train", f"echo planted; exit {status}")
        done = job("--seeds", "2")
        assert_refused(done, f"2 of 2 runs failed (seed 1: stage 4 (train) {reason}, see ", "; seed 2: ", status=1)
        assert "BLEU" not in done.stdout
        assert not (tmp_path / "exp/RESULT.json").exists()


def test_an_average_by_updates_without_checkpoints_is_refused(job, stubs, tmp_path):
    assert_refused(job("--average-updates", "1000"), "no checkpoint of every 1000 updates", "--average-updates 0")
    (tmp_path / "exp/checkpoints/checkpoint_3_1000.pt").touch()
    assert "using the last one" in job("--average-updates", "1000").stdout
    (tmp_path / "exp/checkpoints/checkpoint_5_2000.pt").touch()
    programs(stubs)
    assert "only 2 checkpoints exist" in job("--average-updates", "1000", "--stage", "5", "--stop-stage", "5").stdout
    assert "average --last-updates 2" in stubs.read_text()
    assert job("--average-updates", "1000").returncode == 0
    assert json.loads((tmp_path / "exp/RESULT.json").read_text())["averaged"] == 2, "not the 5 that were asked for"


def test_means_over_seeds_also_of_the_difference_from_another_run(tmp_path, capsys):
    for seed in (1, 2):
        make_run(tmp_path / f"seed{seed}", {**RECORD, "valid_ppl": 4.0 + seed})
    summary.summarise(str(tmp_path), [1, 2], [3])
    record, said = json.loads((tmp_path / "RESULT.json").read_text()), capsys.readouterr().out
    assert record["valid_ppl"] == {"mean": 5.5, "std": pytest.approx(0.5**0.5), "min": 5.0, "max": 6.0}
    assert record["bleu"]["mean"] == 12.345 and record["difference"]["mean"] == 2.345 and "p" not in record
    assert re.search(r"^  1 +12\.3\d +40\.50 +5\.00 +\+2\.3\d +0\.012$", said, re.MULTILINE), said
    assert "  3 FAILED" in said and re.search(r"\nBLEU = 12\.3\d\n$", said)
