"""``fairseq-deep distill``: the teacher's output as a training text, also after an interruption at any point."""

import argparse
import errno
import fcntl
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess

import pytest
import torch
from sacrebleu.metrics import BLEU

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.commands import distill as module
from fairseq_deep.recipes.engine import Engine
from fairseq_deep.recipes.text import distilled
from fairseq_deep.recipes.text.distilled import RECORD
from fairseq_deep.tools import translate
from tests.helpers import faults
from tests.helpers.commands import BIN, run
from tests.helpers.processes import children, live, until

GREEDY = ["--beam", "1"]  # where batches differ, and with them the rounding that decides between near hypotheses
SHARDS = [*GREEDY, "--shard-lines", "70"]  # three shards
FLAGS = ("--workers 3 --shard-lines 9 --choose nearest --beam 7 --lenpen 0 --gnmt-lenpen --max-len-a 1.5 --max-len-b 9 "
         "--decode-precision int8 --batch-size 5 --max-tokens 99 --cpu --data D --bpe-codes C --tokenizer none "
         "--lowercase -s en -t de").split()  # fmt: skip


@pytest.fixture(scope="module")
def text(trained):
    return trained / "text/raw"


def distill(teacher, text, output, *flags, **options):
    words = ["--text", text, "--output", output, "--cpu", *flags]
    return run("fairseq-deep", "distill", teacher, *words, **options)


def translated(teacher, text, *flags):
    return run("fairseq-deep", "translate", teacher, "--input", text / "train.en", "--cpu", *flags).stdout


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(trained, text, tmp_path_factory):
    """Three shards, without an interruption."""
    output = tmp_path_factory.mktemp("whole") / "out"
    done = distill(trained, text, output, *SHARDS)
    assert done.stdout.endswith(f"{output}: 200 pairs\n") and not done.stderr
    return output


def test_targets_are_those_of_translate_and_all_else_that_of_the_text(trained, text, whole):
    assert (whole / "train.de").read_text() == translated(trained, text, *GREEDY)
    others = ["train.en", "valid.en", "valid.de", "test.en", "test.de"]
    assert sorted(path.name for path in whole.iterdir()) == sorted([*others, "train.de", RECORD])
    assert all((whole / name).read_bytes() == (text / name).read_bytes() for name in others)
    record = json.loads((whole / RECORD).read_text())
    assert (record["pairs"], record["too_long"]) == (200, 0)
    assert not whole.with_name("out.unfinished").exists()


def test_a_finished_folder_belongs_to_its_settings(trained, text, whole, tmp_path, command):
    def again(teacher=trained, folder=text, output=whole, *more):
        code, *said = command("distill", teacher, "--text", folder, "--output", output, "--cpu", *GREEDY, *more)
        return code, "".join(said)

    assert again() == (0, f"{whole} is complete: 200 pairs; nothing to do\n")
    other = shutil.copytree(text, tmp_path / "text")
    (other / "train.en").write_text("".join((text / "train.en").read_text().splitlines(keepends=True)[::-1]))
    earlier = next(trained.glob("checkpoints/checkpoint_*_110.pt"))
    parts = ["--data", trained / "data-bin", "--bpe-codes", trained / "text/bpe/code"]
    nearest = ["--beam", "3", "--choose", "nearest"]
    for words, problem in (((earlier, text, whole, *parts), "another teacher"), ((trained, other), "another text: use"),
                           ((trained, text, whole, *nearest), "another search, another --choose: use")):  # fmt: skip
        code, line = again(*words)
        assert code == 2 and line.count("\n") == 1 and f"{whole} was written with {problem}" in line
        assert line.endswith("use the same, or another --output\n")
    edited = shutil.copytree(text, tmp_path / "edited")
    (edited / "test.domain").write_text("news\n")
    problem = f"{whole}/test.domain is not the present {edited}/test.domain: copy it, or use another --output"
    assert again(trained, edited) == (2, f"fairseq-deep distill: {problem}\n")


def test_nearest_of_compressed_text_with_lines_that_are_too_long_or_unknown(trained, text, tmp_path):
    """Hypotheses are those of translate; the chosen one has the highest sentence BLEU."""
    (tmp_path / "in").mkdir()
    for lang, long, unknown in (("en", "we see the house " * 9, "ξένη\u2028γλώσσα"), ("de", "zu lang", "fremd")):
        lines = [*(text / f"train.{lang}").read_text().splitlines()[:40], long.strip(), unknown]
        with gzip.open(tmp_path / f"in/train.{lang}.gz", "wt") as stream:
            stream.write("\n".join(lines) + "\n")
    done = distill(
        trained, tmp_path / "in", tmp_path / "out", "--shard-lines", "41", "--choose", "nearest", "--beam", "3"
    )
    assert done.stdout.endswith(f"{tmp_path}/out: 42 pairs; 1 too long for the teacher keep their reference\n")
    found = (tmp_path / "out/train.de").read_text().split("\n")[:-1]
    assert len(found) == 42 and found[40] == "zu lang"
    lists = translated(trained, text, "--beam", "3", "--nbest", "3", "--json").splitlines()
    metric, other = BLEU(effective_order=True), 0
    for line, target, reference in zip(lists, found[:40], (text / "train.de").read_text().splitlines()):
        hypotheses = [each["text"] for each in json.loads(line)["translations"]]
        scores = [metric.sentence_score(each, [reference]).score for each in hypotheses]
        assert target == hypotheses[scores.index(max(scores))]
        other += target != hypotheses[0]
    assert other


def parsed(kind, words):
    parser = argparse.ArgumentParser()
    kind.add_arguments(parser)
    return parser.parse_args(words)


def test_processes_get_all_options_of_the_search_and_of_the_model():
    args = parsed(module, ["one", "two", "--text", "T", "--output", "O", *FLAGS])
    found = vars(parsed(translate, module._words(args)))
    assert (found["models"], found["nbest"]) == (["one", "two"], 7)
    best = parsed(module, ["one", "--text", "T", "--output", "O"])
    assert (best.beam, best.choose, parsed(translate, module._words(best)).nbest) == (5, "best", 1)
    shared = {name: value for name, value in vars(args).items() if name in found and name != "output"}
    assert shared == {name: found[name] for name in shared} and len(shared) == 16
    assert all(parsed(translate, ["m"]).__dict__[name] != value for name, value in shared.items()), "no default"


@pytest.mark.parametrize("flags, visible, gpus", [
    ([], "3,5", ["3", "5"]), (["--workers", "3"], "", ["0", "1", "0"]), (["--workers", "2", "--cpu"], "", [None] * 2),
])  # fmt: skip
def test_processes_share_gpus_and_cores(flags, visible, gpus, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(module, "count_cores", lambda: 6)
    args = parsed(module, ["m", "--text", "T", "--output", "O", *flags])
    found = module._environments(args, 9)
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == gpus
    assert [each["OMP_NUM_THREADS"] for each in found] == [str(6 // len(gpus))] * len(gpus)
    assert len(module._environments(args, 1)) == 1, "no more than shards"


def test_interruptions_lose_only_the_running_shards(trained, text, whole, tmp_path):
    output, work = tmp_path / "out", tmp_path / "out.unfinished"
    words = [BIN / "fairseq-deep", "distill", trained, "--text", text, "--output", output, "--cpu", *SHARDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def stop(number, shards=0):
        """Status and errors after SIGINT to all, as a terminal sends it, or SIGKILL of a process that translates."""
        process = subprocess.Popen([*words, "--workers", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True, env=environment, process_group=0)  # fmt: skip
        until(lambda: len(list(work.glob("0*.json"))) >= shards)
        pids = until(lambda: children(process.pid))
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            os.kill(int(pids[0]), number)
        errors = process.communicate(timeout=120)[1]
        until(lambda: not live(*pids))
        return process.returncode, errors

    problem = "ended by signal 9 (out of memory?); run the same command again to resume, with fewer --workers\n"
    assert stop(signal.SIGKILL) == (2, f"fairseq-deep distill: {problem}") and not list(work.glob("0*.json"))
    said = "fairseq-deep distill: interrupted; the same command resumes\n"
    assert stop(signal.SIGINT, shards=1) == (130, said) and not output.exists()
    kept = min(work.glob("0*.json"))
    kept.write_text(kept.read_text().replace('["', '["kept ', 1))
    changed = distill(trained, text, output, *GREEDY, "--shard-lines", "80", check=False).stderr
    assert f"{work} was written with another --shard-lines: use the same, or another --output" in changed
    distill(trained, text, output, *SHARDS)
    expected, at = (whole / "train.de").read_text().splitlines(), 70 * int(kept.stem)
    expected[at] = f"kept {expected[at]}"
    assert (output / "train.de").read_text().splitlines() == expected and not work.exists()


def test_any_write_of_the_folder_may_fail_or_be_the_last(text, whole, tmp_path):
    """With all shards there, so that only the folder is put together; the same command ends all that it leaves."""
    place = tmp_path / "place"
    output, work = place / "out", place / "out.unfinished"
    work.mkdir(parents=True)
    targets, record = (whole / "train.de").read_text().splitlines(), json.loads((whole / RECORD).read_text())
    (work / "settings.json").write_text(json.dumps({**record["settings"], "--shard-lines": 70}))
    for number in range(3):
        shard = {"targets": targets[70 * number : 70 * number + 70], "too_long": 0}
        (work / f"{number:06d}.json").write_text(json.dumps(shard))
    job = distilled.Job(str(output), distilled.survey(str(text), ("en", "de")), 70, record["settings"])

    def finish():
        with Engine() as engine, job.begun(engine):
            assert job.is_finished() or not job.missing() and job.finish() == 0

    kinds = []
    for kind, error in faults.each_fault(place, finish):
        kinds.append(kind)
        if error is not None:
            assert isinstance(error, UsageError) and os.strerror(getattr(errno, kind)) in str(error), kind
            assert "\n" not in str(error) and not output.exists() and len(list(work.glob("0*.json"))) == 3, kind
        finish()
        assert hashes(output) == hashes(whole) and not work.exists(), kind
    assert min(map(kinds.count, faults.KINDS)) > 10


def test_a_full_disk_leaves_no_half_shard(trained, text, tmp_path):
    prepare = ["resource:setrlimit", resource.RLIMIT_FSIZE, [2048, 2048]]
    done = distill(trained, text, tmp_path / "out", *GREEDY, prepare=prepare, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    problem = f"cannot write {tmp_path}/out.unfinished/000000.json.in: File too large"
    assert done.stderr.startswith(f"fairseq-deep distill: {problem}")
    assert not (tmp_path / "out.unfinished").exists()


def test_one_command_at_a_time(trained, text, tmp_path, command, monkeypatch):
    monkeypatch.setenv("RECIPE_PATIENCE", "0")
    (tmp_path / "out.unfinished").mkdir()
    with open(tmp_path / "out.unfinished/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, line = command("distill", trained, "--text", text, "--output", tmp_path / "out")
    assert code == 2 and line.endswith("is in use by another run: try again later, or use another --output\n")
