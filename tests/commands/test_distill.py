"""``fairseq-deep distill``: the teacher's output as a training text, also after an interruption at any point."""

import fcntl
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from fairseq_deep.recipes.text.distilled import RECORD
from fairseq_deep.tools import translate
from tests.helpers import faults
from tests.helpers.commands import BIN, run

GREEDY = ["--beam", "1"]  # where batches differ, and with them the rounding that decides between near hypotheses


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
    """Many shards, in two processes, without an interruption."""
    output = tmp_path_factory.mktemp("whole") / "out"
    done = distill(trained, text, output, *GREEDY, "--workers", "2", "--shard-lines", "10")
    assert done.stdout.endswith(f"{output}: 200 pairs\n") and not done.stderr
    return output


def test_targets_are_those_of_translate_and_all_else_that_of_the_text(trained, text, whole, tmp_path):
    assert (whole / "train.de").read_text() == translated(trained, text, *GREEDY)
    distill(trained, text, tmp_path / "out")  # one shard: also the batches are those of translate
    assert (tmp_path / "out/train.de").read_text() == translated(trained, text, "--beam", "5")
    assert (tmp_path / "out/train.de").read_text() != (text / "train.de").read_text()
    others = ["train.en", "valid.en", "valid.de", "test.en", "test.de"]
    assert sorted(path.name for path in whole.iterdir()) == sorted([*others, "train.de", RECORD])
    assert all((whole / name).read_bytes() == (text / name).read_bytes() for name in others)
    record = json.loads((whole / RECORD).read_text())
    assert record["pairs"] == 200 and record["too_long"] == 0
    assert record["files"] == {name: each for name, each in hashes(whole).items() if name != RECORD}
    assert not whole.with_name("out.unfinished").exists()


def test_a_finished_folder_is_verified_and_belongs_to_its_settings(trained, text, whole, tmp_path, command):
    def again(teacher=trained, folder=text, output=whole, *more):
        words = ["--text", folder, "--output", output, "--cpu", *GREEDY, "--shard-lines", "10"]
        code, *said = command("distill", teacher, *words, *more)
        return code, "".join(said)

    assert again() == (0, f"{whole} is complete: 200 pairs, checksums verified; nothing to do\n")
    copy = shutil.copytree(whole, tmp_path / "copy")
    with (copy / "train.de").open("a") as stream:
        stream.write("one more\n")
    code, line = again(output=copy)
    assert code == 2 and f"{copy}/train.de is missing or corrupt: delete {copy} and run the same command again" in line
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
    assert hashes(whole)["train.de"] == json.loads((whole / RECORD).read_text())["files"]["train.de"]


def test_the_nearest_hypothesis(trained, text, tmp_path):
    distill(trained, text, tmp_path / "out", "--choose", "nearest", "--beam", "3")
    found = (tmp_path / "out/train.de").read_text().splitlines()
    lists = translated(trained, text, "--beam", "3", "--nbest", "3", "--json").splitlines()
    metric, other = BLEU(effective_order=True), 0
    for line, target, reference in zip(lists, found, (text / "train.de").read_text().splitlines()):
        hypotheses = [each["text"] for each in json.loads(line)["translations"]]
        scores = [metric.sentence_score(each, [reference]).score for each in hypotheses]
        assert target == hypotheses[scores.index(max(scores))]
        other += target != hypotheses[0]
    assert len(found) == 200 and other > 5


def test_compressed_text_lines_that_are_too_long_and_a_shard_of_unknown_words(trained, text, tmp_path):
    (tmp_path / "in").mkdir()
    written = {}
    for lang, long, unknown in (("en", "we see the house " * 9, "ξένη γλώσσα"), ("de", "zu lang", "fremd")):
        written[lang] = [*(text / f"train.{lang}").read_text().splitlines()[:3], long.strip(), unknown]
        with gzip.open(tmp_path / f"in/train.{lang}.gz", "wt") as stream:
            stream.write("\n".join(written[lang]) + "\n")
    done = distill(trained, tmp_path / "in", tmp_path / "out", "--shard-lines", "4")
    assert done.stdout.endswith(f"{tmp_path}/out: 5 pairs; 1 too long for the teacher keep their reference\n")
    found = (tmp_path / "out/train.de").read_text().splitlines()
    assert len(found) == 5 and found[3] == "zu lang"
    assert (tmp_path / "out/train.en").read_text().splitlines() == written["en"]


def wait_for(condition):
    for _ in range(12000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it takes too long")


def ended(pid):
    """Whether a process has ended, perhaps without being waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(process):
    """Its translating processes: with the start method forkserver, Python adds a process of its own."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as stream:
        found = [int(pid) for pid in stream.read().split()]
    return [pid for pid in found if b"multiprocessing" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def interrupted(words, number, output, work):
    """Interrupt the command *words* by a signal after three of its 100 shards; return the shards that it kept.

    Repeated if the command was faster than this process.
    """
    for _ in range(5):
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(lambda child=child: len(list(work.glob("0*.json"))) >= 3 or child.poll() is not None)
        workers = [] if child.poll() is not None else children(child)
        child.send_signal(number)
        child.communicate(timeout=300)
        shards = sorted(work.glob("0*.json"))
        if child.returncode and len(shards) < 100:
            break
        shutil.rmtree(output if output.exists() else work)
    assert child.returncode and len(workers) == 2 and not output.exists()
    wait_for(lambda: all(map(ended, workers)))
    return sorted(work.glob("0*.json"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
def test_an_interruption_loses_at_most_a_shard_of_each_process(number, trained, text, whole, tmp_path):
    output, work = tmp_path / "out", tmp_path / "out.unfinished"
    words = [BIN / "fairseq-deep", "distill", trained, "--text", text, "--output", output, "--cpu", *GREEDY,
             "--workers", "2", "--shard-lines", "2", "--batch-size", "1"]  # fmt: skip
    shards = interrupted(words, number, output, work)
    assert 3 <= len(shards) < 100
    kept = json.loads(shards[0].read_text())
    shards[0].write_text(json.dumps({**kept, "targets": ["kept", *kept["targets"][1:]]}))
    shards[1].write_text(shards[1].read_text()[:-20])  # damaged: translated again
    words[words.index("--workers") + 1] = "2" if number == signal.SIGKILL else "1"
    assert run("fairseq-deep", *words[1:]).stdout.endswith(f"{output}: 200 pairs\n")
    found, expected = ((folder / "train.de").read_text().splitlines() for folder in (output, whole))
    start = 2 * int(shards[0].stem)
    assert found[start] == "kept" and [*found[:start], expected[start], *found[start + 1 :]] == expected
    assert not work.exists()


def test_killed_at_any_write_of_the_folder(trained, text, whole, tmp_path):
    """With all shards there, so that only the folder is put together."""
    place, cases, ended = (tmp_path / name for name in ("place", "cases", "ended.json"))
    output, work = place / "out", place / "out.unfinished"
    cases.mkdir()
    work.mkdir(parents=True)
    record = json.loads((whole / RECORD).read_text())
    targets = (whole / "train.de").read_text().splitlines()
    (work / "settings.json").write_text(json.dumps(record["settings"]))
    for number in range(20):
        shard = {"targets": targets[10 * number : 10 * number + 10], "too_long": 0}
        (work / f"{number:06d}.json").write_text(json.dumps(shard))
    prepare = ["tests.helpers.faults:install", str(place), str(cases), str(ended)]
    distill(trained, text, output, *GREEDY, "--shard-lines", "10", prepare=prepare)
    assert hashes(output) == hashes(whole)
    status = json.loads(ended.read_text())
    count = len(status) // len(faults.KINDS)
    assert count > 10

    def again(case):
        distill(trained, text, output, *GREEDY, "--shard-lines", "10")
        assert hashes(output) == hashes(whole) and not work.exists(), case

    def take(case):
        shutil.rmtree(place)
        (cases / case).rename(place)
        return status[case], (cases / f"{case}.log").read_text()

    for at in range(1, count + 1):
        assert take(f"kill.{at}")[0] == faults.KILLED
        again(at)
    for at in range(1, count - 3, 3):  # the last ones need no room
        code, told = take(f"ENOSPC.{at}")
        assert code == 2 and told.count("\n") == 1 and "No space left on device" in told, at
        assert not output.exists() and len(list(work.glob("0*.json"))) == 20
        again(at)


def test_a_full_disk_of_a_process_is_one_line(trained, text, tmp_path):
    prepare = ["resource:setrlimit", resource.RLIMIT_FSIZE, [2048, 2048]]
    done = distill(trained, text, tmp_path / "out", prepare=prepare, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"fairseq-deep distill: cannot write {tmp_path}/out.unfinished/000000.json: File too")
    assert not os.listdir(tmp_path)


def test_a_process_that_is_killed_is_one_line(trained, text, tmp_path):
    words = [BIN / "fairseq-deep", "distill", trained, "--text", text, "--output", tmp_path / "out", "--cpu"]
    child = subprocess.Popen([*words, "--workers", "1"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: children(child))
    os.kill(children(child)[0], signal.SIGKILL)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 2 and errors.count("\n") == 1
    assert "a translating process has ended (status -9), perhaps out of memory: run the same command" in errors


def test_one_command_at_a_time(trained, text, tmp_path, command):
    (tmp_path / "out.unfinished").mkdir()
    with open(tmp_path / "out.unfinished/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, line = command("distill", trained, "--text", text, "--output", tmp_path / "out")
    assert code == 2 and line.endswith("out.unfinished is in use by another process: try again later\n")


def test_ctrl_c_says_how_to_resume(monkeypatch, command):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(translate, "find_parts", interrupted)
    told = "fairseq-deep distill: interrupted; the same command resumes\n"
    assert command("distill", "MODEL", "--text", "TEXT", "--output", "OUT") == (130, "", told)
