"""The plan of a recipe: it reads the training text before the stage that checks it; disk, time and formats."""

import gzip
import math
import re
from types import SimpleNamespace

import pytest

from fairseq_deep.recipes import estimate
from tests.helpers.paths import ROOT
from tests.helpers.recipes import checked


def damaged(content):
    packed = bytearray(gzip.compress(content))
    packed[10:30] = b"\xff" * 20  # no valid type of a block
    return bytes(packed)


@pytest.mark.parametrize(
    "content, count",
    [(gzip.compress(b"a b\n" * 7), 7), (damaged(bytes(range(256)) * 40), 10**5), (b"none", 10**5), (None, 10**5)],
    ids=["whole", "damaged", "other", "missing"],
)  # fmt: skip
def test_a_text_that_cannot_be_read_is_left_to_its_stage(content, count, tmp_path):
    if content is not None:
        (tmp_path / "train.de.gz").write_bytes(content)
    options = SimpleNamespace(data=str(tmp_path), target_lang="de", multilingual=None)
    assert estimate._count_pairs(SimpleNamespace(options=options)) == count


def planned(*words, gpus="8"):
    done = checked(ROOT / "run_wmt16_ende.sh", "--dry-run", "--ngpu", gpus, "--exp", "/nowhere/at/all", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_seeds_share_the_text_and_have_checkpoints_of_their_own():
    one, three, given = (
        int(re.search(r"^disk +about (\d+) GB", planned(*words), re.MULTILINE)[1])
        for words in ((), ("--seeds", "3"), ("--seeds", "3", "--disk-gb", "7"))
    )
    checkpoints = 12 * 0.137 * (5 + 3)  # GB of 137 million parameters and their moments, last, best and average
    assert one == 25 and three == one + 2 * math.ceil(checkpoints) and given == 7


def test_hours_on_a_gpu_that_was_measured():
    assert "about 2 h on 8 x H100 in fp16 or bf16" in planned()
    assert "about 15 h on 1 x H100" in planned("--update-freq", "16", gpus="1")
    assert "H100" not in planned("--precision", "fp32", gpus="0")


def test_paths_are_normalised():
    done = checked(ROOT / "run_wmt16_ende.sh", "--dry-run", "--ngpu", "8", "--exp", "/nowhere/a/./../b/")
    assert "\nfolder   /nowhere/b\n" in done.stdout and "/.." not in done.stdout


PLAIN = "fairseq's transformer, CTranslate2, transformers"


@pytest.mark.parametrize("words, formats", [
    ((), f"torch (.pt2), package; not {PLAIN} (--layer-agg dlcl)"),
    (("--conf", "base_prenorm"), f"torch (.pt2), package, {PLAIN}"),
    (("--arch", "transformer_completep_18l18l"), f"torch (.pt2), package, {PLAIN}"),
    (("--conf", "base_prenorm", "--", "--rotary-positions"),
     "torch (.pt2), package, CTranslate2; not fairseq's transformer, transformers (--rotary-positions)"),
    (("--arch", "transformer"), None),
])  # fmt: skip
def test_a_plan_names_the_formats_of_export(words, formats):
    found = re.search(r"^exports  (.*)$", planned(*words), re.MULTILINE)
    assert found[1] == formats if formats else found is None


@pytest.mark.parametrize("words, warning", [
    (("--", "--max-update", "300"), "training ends within its warm-up (--max-update 300, --warmup-updates 16000)"),
    (("--conf", "base_prenorm", "--", "--max-update", "8001"), None),
    (("--against", "/no/such/run"), "--against /no/such/run: no such run or file"),
    (("--teacher", "/no/such/run"), "--teacher /no/such/run: no such run, checkpoint or package"),
    (("--against", str(ROOT / "docs")), f"--against: {ROOT}/docs/test.hyp.de does not exist"),
])  # fmt: skip
def test_a_plan_warns_of_what_a_run_rejects_or_trains_badly(words, warning):
    """A dry run may precede the run that it names."""
    found = re.findall(r"^warning  (.*)$", planned(*words), re.MULTILINE)
    assert len(found) == bool(warning) and all(line.startswith(warning) for line in found)


def test_a_short_training_on_a_gpu_is_not_of_no_minutes():
    assert "about 1 min on 1 x H100" in planned("--", "--max-update", "20", "--warmup-updates", "5", gpus="1")
