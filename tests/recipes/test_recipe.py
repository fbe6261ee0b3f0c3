"""Stages that resume, and what a resumed run refuses. ``test_tutorial.py`` has a job from text to BLEU."""

import json
import os
import shutil
from pathlib import Path

from fairseq_deep.recipes.engine import Engine
from fairseq_deep.runtime import find_bundle
from tests.helpers.recipes import MAIN, SMALL, assert_refused, driven, programs, write_pairs


class TestStages:
    def test_done_stages_are_skipped_and_changed_ones_run_again(self, job, stubs, tmp_path):
        exp = tmp_path / "exp"
        done = job()
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-3:] == [f"  next        fairseq-deep translate {exp} --input FILE",
            f"              fairseq-deep package {exp} --output DIR", "BLEU = 12.34"]  # fmt: skip
        score = ["fairseq-deep score"] * 3
        tail = ["fairseq-deep average", "fairseq-generate", *score]
        assert programs(stubs) == ["fairseq-deep doctor", "fairseq-preprocess", "fairseq-train", *tail]
        assert job().stdout.count("already done") == 8
        assert programs(stubs) == []
        job("--beam", "2")
        assert programs(stubs) == ["fairseq-generate", *score]
        job("--beam", "2", "--stage", "5", "--stop-stage", "5")
        assert programs(stubs) == ["fairseq-deep average"]

    def test_a_set_without_text_is_found_before_training(self, job, stubs, corpus):
        assert job("--stop-stage", "3").returncode == 0
        programs(stubs)
        write_pairs(corpus, test1=[("a", "b")])
        done = job("--stage", "4", "--subsets", "test,test1")
        assert_refused(done, "--subsets test,test1: the text has no test1, only train, valid, test")
        assert programs(stubs) == []

    def test_a_failed_stage_ends_with_one_line(self, job, stubs, tmp_path):
        exp = tmp_path / "exp"
        exp.mkdir()
        (exp / "RESULT.json").write_text('{"bleu": 1}')  # of an earlier model
        Path(f"{stubs}.fail").touch()
        done = job()
        assert_refused(done, "stage 4 (train) failed", "ValueError: planted", "4-train.log", "resume.sh", status=1)
        assert not (exp / "averaged.pt").exists() and not (exp / "RESULT.json").exists()

    def test_a_lost_translation_fails_the_stage(self, job, corpus):
        write_pairs(corpus, test=[("a", "b")] * 12)
        done = job()
        assert_refused(done, "stage 6 (generate) failed", "only 11 of 12 sentences", status=1)

    def test_a_run_is_resumed_as_it_was_begun_and_a_longer_one_is_too(self, job, stubs, tmp_path):
        """``test_recipe_options.py`` has all settings."""
        exp = tmp_path / "exp"
        assert job("--", "--max-epoch", "3").returncode == 0
        before = (exp / "RESULT.json").read_text()
        programs(stubs)
        for changed, named in (
            (("--max-tokens", "1024"), "1 device(s) x 2048 tokens x update-freq 1"),
            (("--lowercase", "true"), "other data"), (("--arch", "transformer_dlcl_6l"), "transformer_dlcl_12l"),
            (("--", "--decoder-layers", "5"), "exp was trained with --decoder-layers 3, now --decoder-layers 5"),
        ):  # fmt: skip
            assert_refused(job(*changed), named)
        (exp / "checkpoints/checkpoint_last.pt").unlink()  # fairseq-train resumes from that of an epoch
        assert_refused(job("--seed", "7"), "exp was trained with --seed 1, now --seed 7")
        assert programs(stubs) == [] and (exp / "RESULT.json").read_text() == before
        longer = ("--", "--max-epoch", "6", "--log-interval", "7", "--keep-last-epochs", "9")
        for words in (longer, ("--max-tokens", "1024", "--force-batch", "true")):
            assert job(*words).returncode == 0
            assert programs(stubs)[0] == "fairseq-train"
        noted = (exp / "trained-with.txt").read_text().splitlines()
        (exp / "trained-with.txt").write_text("\n".join([*noted[:2], "another", noted[3]]) + "\n")
        assert_refused(job(), "trained on other data or other sub-words: use another --exp")
        assert programs(stubs) == []
        assert job("--stage", "6").stdout.splitlines()[-1] == "BLEU = 12.34", "which is no training"
        assert programs(stubs)[0] == "fairseq-generate"

    def test_a_later_stage_reports_the_training_that_there_was(self, job, tmp_path):
        """Translated with another command line, it is still the model that it is."""
        assert job().returncode == 0
        exp = tmp_path / "exp"
        before = json.loads((exp / "RESULT.json").read_text())
        other = ("--seed", "7", "--max-tokens", "512", "--precision", "bf16", "--arch", "transformer_dlcl_6l")
        assert job(*other, "--stage", "6", "--beam", "2").returncode == 0
        after = json.loads((exp / "RESULT.json").read_text())
        names = ("seed", "max_tokens", "precision", "arch", "tokens_per_update", "devices")
        assert {name: after[name] for name in names} == {name: before[name] for name in names}
        assert before["seed"] == 1 and before["precision"] == "fp32" and before["devices"] == "1 CPU"
        assert after["beam"] == 2 and before["averaged"] == 2, "two of the five"
        search = ("--average-updates", "9", "--average", "3", "--lenpen", "1.0")
        assert job(*other, "--stage", "7", *search).returncode == 0
        again = json.loads((exp / "RESULT.json").read_text())
        (exp / "RESULT.json").unlink()
        assert find_bundle(str(exp)).beam == 2, "translate has the search of the run, also before its record"
        names = ("beam", "lenpen", "averaged", "average_updates")
        assert {name: again[name] for name in names} == {name: after[name] for name in names}

    def test_a_new_training_has_a_record_of_its_own(self, job, tmp_path):
        exp = tmp_path / "exp"
        assert job().returncode == 0
        better = {"kind": "valid", "time": 9, "session": 1, "epoch": 1, "valid_ppl": "1.5", "valid_num_updates": "3"}
        (exp / "train.jsonl").write_text(json.dumps(better) + "\n")
        assert job("--stage", "7").returncode == 0
        assert json.loads((exp / "RESULT.json").read_text())["best_valid_ppl"] == 1.5
        shutil.rmtree(exp / "checkpoints")
        assert job("--stage", "4").returncode == 0
        assert "best_valid_ppl" not in json.loads((exp / "RESULT.json").read_text())
        assert json.loads((exp / "train.before.jsonl").read_text()) == better
        shutil.rmtree(exp / "checkpoints")
        assert job("--stage", "4", "--stop-stage", "4").returncode == 0
        assert find_bundle(str(exp)).checkpoint == str(exp / "checkpoints/checkpoint_last.pt"), "not the earlier model"

    def test_a_folder_in_use_or_that_cannot_be_made_is_refused(self, job, stubs, tmp_path, monkeypatch):
        monkeypatch.setenv("RECIPE_PATIENCE", "0")
        monkeypatch.setenv("FAIRSEQ_DEEP_ENV", "")  # by start.sh: resume.sh must use the clone's, too
        with Engine() as other:
            other.take_lock(str(tmp_path / "exp"))
            problem = f"exp is in use by process {os.getpid()} on ", "try again later, or use another --exp"
            assert_refused(job("--stop-stage", "0"), *problem)
        assert programs(stubs) == [] and job("--stop-stage", "0").returncode == 0
        assert "FAIRSEQ_DEEP_ENV" not in (tmp_path / "exp/resume.sh").read_text()
        assert_refused(job("--stage", "6"), "stage 6 requires", "averaged.pt")
        done = driven(MAIN, "--exp", f"{stubs}/exp", "--demo", *SMALL)  # which is a file
        assert_refused(done, f"cannot write to {stubs}/exp (Not a directory): choose another --exp")

    def test_too_little_disk_and_a_batch_below_the_longest_sentence(self, job, tmp_path):
        exp = tmp_path / "exp"
        assert_refused(job("--disk-gb", "99999999"), "GB free")
        assert not exp.exists()
        done = job("--max-tokens", "4", "--batch-tokens", "4")
        assert_refused(done, "longest sentence", "more than 4: raise --max-tokens")
