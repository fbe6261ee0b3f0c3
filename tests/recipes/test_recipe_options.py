"""The options of the recipes: what is accepted, what is refused, and what the real job would run (--dry-run)."""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from fairseq import options as fairseq_options
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from fairseq_deep import list_archs
from fairseq_deep.cli import main
from fairseq_deep.core.registry import nearest
from fairseq_deep.recipes import commands, driver, scripts
from fairseq_deep.recipes.options import SIMILAR, flag_of, quote
from fairseq_deep.recipes.plan import Plan
from fairseq_deep.recipes.recipe import Recipe
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked

IWSLT = ROOT / "examples/iwslt14_deen/run.sh"
LSTM = ROOT / "examples/depthwise_lstm/run.sh"
CONFS = sorted((ROOT / "examples").glob("*/conf/*.args")) + [ROOT / "examples/demo/demo.args"]


def run(*words, script=MAIN, env=(), cwd=None):
    """In this process, unless it is to have another environment or folder."""
    if not env and cwd is None:
        return checked(script, *words)
    environment = {**os.environ, **dict(env)}
    command = [str(script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)


def on_gpus(words):
    """Those of a machine with 8 GPUs, if they name no other number."""
    return words if "--ngpu" in words else ("--ngpu", "8", *words)


def dry(tmp_path, *words, **how):
    """The lines of a dry run in a folder that must stay away."""
    exp = tmp_path / "exp folder"
    done = run("--dry-run", "--exp", exp, *on_gpus(words), **how)
    assert done.returncode == 0, done.stderr
    assert not exp.exists()
    return done.stdout.splitlines()


def command(lines, name):
    """The words of the first command called ``name``."""
    return next(words for words in map(shlex.split, (x for x in lines if x.startswith(name))) if words[0] == name)


def value(words, flag):
    """The value that argparse would take: the last one."""
    return words[len(words) - words[::-1].index(flag)]


def refused(*words, **how):
    """The one line that a refused command prints."""
    done = run(*words, **how)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize(
    "words, parts",
    [
        (["--max-token", "5"], ["--max-token'", "--max-tokens"]),
        (["--dryrun"], ["--dryrun'", "--dry-run"]),
        (["--conf", "dlcl30l"], ["'dlcl30l'", "dlcl_30l"]),
        (["--smoke", "maybe"], ["--smoke must be true or false", "'maybe'"]),
        (["--ngpu", "two"], ["--ngpu", "'two'"]),
        (["--max-tokens", "-5"], ["--max-tokens", "'-5'"]),
        (["--lenpen", "x"], ["--lenpen", "'x'"]),
        (["--lenpen", ""], ["--lenpen must be a number, not ''"]),
        (["--lenpen="], ["--lenpen must be a number, not ''"]),
        (["-x"], ["'-x'", "start with --"]),
        (["--precision", "fp15"], ["--precision must be fp32, fp16, bf16, amp"]),
        (["--exp"], ["--exp: expected one argument"]),
        (["--exp", "--demo"], ["--exp: expected one argument"]),
        (["demo"], ["'demo'", "start with --"]),
        (["--stage", "5", "--stop-stage", "4"], ["stages must be from 0 to 7"]),
        (["--exp", "a:b"], ["':'"]),
        (["--data", "/no/such/folder"], ["/no/such/folder", "no such directory"]),
        (["--data-tar", "/no/such.tar.gz"], ["/no/such.tar.gz", "no such file"]),
        (["--data", "/tmp", "--demo"], ["exclude each other"]),
        (["--ngpu", "0", "--precision", "fp16"], ["--precision fp16 requires a GPU", "bf16"]),
        (["--ngpu", "8", "--decode-precision", "int8"], ["--decode-precision int8 requires the CPU", "--ngpu 0"]),
        (["--seeds", "2", "--seed", "2"], ["--seed and --seeds exclude each other"]),
        (["--seeds", "0"], ["--seeds must be a number", "'0'"]),
        (["--teacher", "/nowhere"], ["--teacher /nowhere: no such run, checkpoint or package"]),
        (["--seeds", "4,,"], ["--seeds must be a number", "'4,,'", "one seed: 7,"]),
        (["--seeds", "4,5,4"], ["has seed 4 twice"]),
        (["--nnodes", "2", "--master", "h"], ["--nnodes 2 requires --node-rank: 0 on the machine that prepares"]),
        (["--nnodes", "2", "--node-rank", "1"], ["--nnodes 2 requires --master", "with --node-rank 0"]),
        (["--nnodes", "2", "--node-rank", "2", "--master", "h"], ["with --nnodes 2 the numbers are 0 to 1"]),
        (["--nnodes", "2", "--node-rank", "0", "--master", "a:b:c"], ["must be HOST or HOST:PORT, not 'a:b:c'"]),
        (["--node-rank", "1"], ["require several machines: add --nnodes"]),
        (["--nnodes", "2", "--seeds", "3"], ["--seeds and --nnodes exclude each other"]),
        (["--cpu-processes", "2"], ["--cpu-processes requires --ngpu 0"]),
        (["--sbatch", "/no/such/job"], ["--sbatch /no/such/job: cannot write there"]),
        (["--against", "/tmp", "--subsets", "none"], ["--against requires translations"]),
        (["--against", "/no/such/run"], ["--against /no/such/run", "no such run or file"]),
        (["--start-from", "/no/such/run"], ["--start-from /no/such/run", "checkpoint_last.pt does not exist"]),
        (["--start-from", "/no/such/run", "--", "--init-from=x"], ["--start-from and --init-from both set weights"]),
        (["--average-updates", "9", "--average", "1"], ["--average-updates 9 has no effect with --average 1"]),
        (["--average-updates", "9", "--", "--save-interval-updates=5"], ["--save-interval-updates conflicts"]),
        (["--average-updates", "9", "--", "--max-update", "8"], ["--average-updates 9 must be at most 8"]),
        (["--", "--share-all-embeddings"], ["--share-all-embeddings is set by this script", "see --embeddings"]),
        (["--", "--max-tokens", "9"], ["--max-tokens", "give it before --"]),
        (["--", "--max-tokns=9"], ["unknown option '--max-tokns'", "did you mean --max-tokens?"]),
        (["--", "--save-dir=x"], ["--save-dir", "--exp"]),
    ],
)
def test_bad_options_get_one_line(words, parts):
    line = refused(*on_gpus(words))
    for part in parts:
        assert part in line


def test_the_nearest_name_is_a_help_that_can_be_done_without(tmp_path):
    assert "did you mean --beam?" in refused("--baem", "5")
    for word in ("--qqqqqqqqqqqq", "--foo", "--updates", "--max-update"):
        line = refused(word, "5")
        assert "did you mean" not in line and "flags of fairseq-train, such as --max-update, go after --" in line
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = run("--baem", "5", env={"PATH": str(tmp_path), "FAIRSEQ_DEEP_ENV": "current"})
    assert (done.returncode, done.stderr) == (2, "set-up: there is no python3 in PATH; activate an environment\n")


def test_a_value_is_given_once():
    assert refused("--beam", "3", "--beam=5") == "error: --beam is given twice, as 3 and as 5: omit one of them\n"
    assert run("--dry-run", "--ngpu", "8", "--beam", "3", "--beam=3").returncode == 0


@pytest.mark.parametrize("text, said", [
    ("--beam five\n", "--beam must be a whole number of at least 1, not 'five'"),
    ("beam 5\n", "'beam 5' is not an option: a line"),
    ("--conf {path}\n", "includes itself (--conf): remove the line"),
    ("--dropout 0.1\n--batch-tokns 5\n", "own.args: unknown option '--batch-tokns' (did you mean --batch-tokens?)"),
    ("--baem 5\n", "unknown option '--baem' (did you mean --beam?)"),
    ("--conf nothing\n", "unknown --conf 'nothing'"),
])  # fmt: skip
def test_a_wrong_conf_file_is_one_line(text, said, tmp_path):
    path = tmp_path / "own.args"
    path.write_text(text.format(path=path))
    assert said in refused("--ngpu", "8", "--conf", path, "--exp", tmp_path / "exp")
    assert os.listdir(tmp_path) == ["own.args"]


def test_only_flags_that_fairseq_does_not_know_count_as_misspelt():
    """All flags of fairseq and of this package that resemble an option of a recipe are listed."""
    parsers = [fairseq_options.get_training_parser()]
    owners = [*MODEL_REGISTRY.values(), *TASK_REGISTRY.values()]
    owners += [each for kind in REGISTRIES.values() for each in kind["registry"].values() if hasattr(each, "add_args")]
    for owner in owners:
        parsers.append(argparse.ArgumentParser(add_help=False, conflict_handler="resolve"))
        owner.add_args(parsers[-1])
    flags = {flag for parser in parsers for flag in parser._option_string_actions if flag.startswith("--")}
    assert len(flags) > 500
    own = [flag_of(name) for name in Recipe.declared()]
    assert {flag for flag in flags - {"--help", *own} if nearest(flag, own, 0.8)} == set(SIMILAR)


def test_the_resolved_configuration_is_shown():
    done = run("--show-config", "--ngpu", "8", "--conf", "base_prenorm", "--beam", "7")
    shown = dict(line.split(None, 1) for line in done.stdout.splitlines())
    values = {name: json.loads(shown[name]) for name in ("beam", "batch_tokens", "update_freq", "arch", "gnmt_lenpen")}
    assert values == {"beam": 7, "batch_tokens": 32768, "update_freq": 1, "arch": "transformer_prenorm_6l",
                      "gnmt_lenpen": False}  # fmt: skip


@pytest.mark.parametrize(
    "chosen, done", [("current", "checks the active environment"), ("", "creates or updates .venv")]
)
def test_a_dry_run_says_what_happens_to_the_environment(chosen, done, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_DEEP_ENV", chosen)
    assert f"ensure_env  # {done}" in dry(tmp_path)


def test_the_commands_of_fairseq_deep_are_the_scripts(tmp_path, capsys):
    words = ["--dry-run", "--ngpu", "8", "--exp", str(tmp_path / "exp")]
    assert main(["recipe", "iwslt14_deen", *words, "--force-batch"]) == 0
    same = run(*words, "--force-batch", script=IWSLT).stdout
    assert capsys.readouterr().out == same and "fairseq-train" in same
    assert main(["recipe", "wmt16_ende", "--baem", "4"]) == 2 and "did you mean --beam?" in capsys.readouterr().err
    assert main(["compare", "prenorm_6l"]) == 2 and "--data is missing" in capsys.readouterr().err
    assert main(["recipe", "wmt16_endd"]) == 2
    assert "unknown recipe wmt16_endd (did you mean wmt16_ende?)" in capsys.readouterr().err
    assert main(["recipe", "--help"]) == 0 and "TASK: compare, depthwise_lstm" in capsys.readouterr().out
    assert main(["compare", "--help"]) == 0 and "--bootstrap" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["recipe", "wmt16_ende"], ["compare", "dlcl_6l"]])
def test_the_commands_need_a_clone(words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(commands, "EXAMPLES", str(tmp_path / "examples"))
    assert main(words) == 2
    said = f"no recipes in {tmp_path}/examples; run this in a clone of the repository\n"
    assert capsys.readouterr().err == f"fairseq-deep {words[0]}: {said}"


def test_settings_of_the_scripts_work_and_are_not_in_the_help(tmp_path):
    text = run("--help").stdout
    assert "--beam" in text and "--data-url" in text
    for flag in ("--task", "--source-lang", "--target-lang", "--download-max-words", "--job-updates"):
        assert not re.search(rf"^  {flag} ", text, re.MULTILINE)
    train = command(dry(tmp_path, "--source-lang", "de", "--target-lang", "en"), "fairseq-train")
    assert (value(train, "--source-lang"), value(train, "--target-lang")) == ("de", "en")


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


@pytest.mark.parametrize("lacks, said", [
    ("", ""),
    ("fairseq", "bin/python cannot import fairseq; run: "),
    ("fairseq_deep", "bin/python cannot import fairseq_deep; run: "),
    ("the same code", "which differs from"),
])  # fmt: skip
def test_the_environment_of_the_user_is_checked_once(tmp_path, lacks, said):
    """And not again by a script that this one calls. The clone in the working directory is not what commands import."""
    (tmp_path / "bin").mkdir()
    if lacks == "fairseq":
        (tmp_path / "fairseq.py").write_text("raise ImportError")
    copied = shutil.copytree(ROOT / "fairseq_deep", tmp_path / "fairseq_deep", ignore=shutil.ignore_patterns("__py*"))
    (copied / "tools/new.py").write_text("")
    if lacks != "the same code":  # as of another clone
        (copied / "tools/new.py").unlink()
    if lacks == "fairseq_deep":
        (copied / "__init__.py").write_text("raise ImportError")
    program = tmp_path / "bin/python"
    program.write_text(f'#!/usr/bin/env bash\necho call >> {tmp_path}/calls\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "FAIRSEQ_DEEP_ENV": "current", "PATH": path, "PYTHONPATH": str(tmp_path)}
    once = f". '{ROOT}/examples/common/env.sh'; ensure_env"
    script = f'{once} && bash -c "{once}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == (1 if lacks else 0) and said in done.stderr and done.stderr.count("\n") == bool(lacks)
    assert (tmp_path / "calls").read_text().count("call") == 1


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_what_is_quoted_reads_the_same_in_bash_and_in_python(locale):
    words = ["a b", "it's", "", "(0.9, 0.98)", "/tmp/\u00fcber uns", "x&y", "\\\\", "*", "$HOME", "a=b,c:d+e@f%", "~"]
    given = {"capture_output": True, "text": True, "encoding": "utf-8", "check": True}
    script = 'eval "set -- $1"; printf "%s\\n" "$@"'
    done = subprocess.run(["bash", "-c", script, "bash", quote(words)], env={**os.environ, "LC_ALL": locale}, **given)
    assert done.stdout.splitlines() == shlex.split(quote(words)) == words


def test_help_shows_the_present_values():
    wide = {"COLUMNS": "200"}
    text = run("--help", "--beam", "7", "--conf", "base_prenorm", env=wide).stdout
    assert re.search(r"^  --beam N +beam width \[7\]$", text, re.MULTILINE)
    assert re.search(r"--batch-tokens .*\[32768\]", text)
    assert re.search(r"--bpe-merges .*\[32000\]", text)
    assert "[1.0]" in next(x for x in run("--help", script=IWSLT).stdout.splitlines() if "--lenpen" in x)


def test_the_real_job_has_the_numbers_of_the_paper(tmp_path):
    lines = dry(tmp_path)
    train = command(lines, "fairseq-train")
    paper = {
        "--arch": "transformer_dlcl_30l",
        "--deep-init": "xavier",
        "--adam-betas": "(0.9, 0.997)",
        "--adam-eps": "1e-8",
        "--lr": "0.002",
        "--warmup-updates": "16000",
        "--warmup-init-lr": "1e-07",
        "--dropout": "0.1",
        "--attention-dropout": "0.1",
        "--activation-dropout": "0.1",
        "--label-smoothing": "0.1",
        "--max-tokens": "4096",
        "--update-freq": "2",
        "--max-epoch": "20",
        "--keep-last-epochs": "5",
        "--weight-decay": "0.0",
        "--clip-norm": "0.0",
        "--lr-scheduler": "inverse_sqrt",
        "--optimizer": "fused_adam",
        "--criterion": "fused_label_smoothed_cross_entropy",
    }
    assert {flag: value(train, flag) for flag in paper} == paper
    assert "--share-all-embeddings" in train and "--fp16" not in train and "--max-update" not in train
    generate = command(lines, "fairseq-generate")
    assert [value(generate, flag) for flag in ("--beam", "--lenpen", "--batch-size")] == ["4", "0.6", "32"]
    assert "--remove-bpe" in generate
    binarise = command(lines, "fairseq-preprocess")
    assert (value(binarise, "--thresholdsrc"), value(binarise, "--thresholdtgt")) == ("5", "5")
    assert "--joined-dictionary" in binarise
    assert any("average --last 5" in line for line in lines)


def test_post_norm_job(tmp_path):
    train = command(dry(tmp_path, "--conf", "dlcl_postnorm_25l"), "fairseq-train")
    assert value(train, "--arch") == "transformer_dlcl_postnorm_25l"
    assert value(train, "--adam-betas") == "(0.9, 0.98)"
    assert value(train, "--attention-dropout") == "0.0" and value(train, "--lr") == "0.002"


def test_jobs_of_the_dlcl_paper_start_as_its_fairseq_did(tmp_path):
    """And nothing else: settings go with architectures that have a start of their own, and mini is a job of ours."""
    for conf in (path for path in CONFS if path.parent.parent.name == "wmt16_ende"):
        whole = [] if "--arch" in conf.read_text() else ["--arch", "transformer_ds_12l12l"]
        train = command(dry(tmp_path, "--conf", conf.stem, "--force-batch", *whole), "fairseq-train")
        of_paper = not whole and conf.stem != "mini" and "matt" not in conf.stem
        assert ("--deep-init" in train) == of_paper, conf.stem
        assert not of_paper or value(train, "--deep-init") == "xavier"


def test_another_architecture_keeps_its_own_start(tmp_path):
    """The start that a job names is its architecture's; one after the lone -- is the user's."""
    named = dry(tmp_path, "--data-tar", __file__, "--arch", "transformer_lipschitz_18l18l")
    assert "--deep-init" not in command(named, "fairseq-train")
    same = dry(tmp_path, "--data-tar", __file__, "--arch", "transformer_dlcl_30l")
    assert value(command(same, "fairseq-train"), "--deep-init") == "xavier"
    given = dry(tmp_path, "--data-tar", __file__, "--arch", "transformer_dlcl_40l", "--", "--deep-init", "ds")
    assert value(command(given, "fairseq-train"), "--deep-init") == "ds"



@pytest.mark.parametrize(
    "ngpu, max_tokens, freq", [(8, 4096, 2), (4, 4096, 4), (1, 4096, 16), (0, 4096, 16), (8, 2048, 4)]
)
def test_update_freq_keeps_the_product(tmp_path, ngpu, max_tokens, freq):
    lines = dry(tmp_path, "--ngpu", ngpu, "--max-tokens", max_tokens)
    assert value(command(lines, "fairseq-train"), "--update-freq") == str(freq)
    assert any("= 65,536 tokens per update" in line for line in lines)


def test_several_machines_keep_the_product(tmp_path):
    lines = dry(tmp_path, "--nnodes", "2", "--node-rank", "0", "--master", "h:1234")
    assert "batch    16 GPUs x 4,096 tokens x update-freq 1 = 65,536 tokens per update" in lines
    found = [line for line in lines if line.startswith("torchrun")]
    assert len(found) == 2 and found[1] == found[0].replace("--node_rank 0", "--node_rank 1")
    place = "torchrun --nnodes 2 --node_rank 0 --master_addr h --master_port 1234 --nproc_per_node 8 --no_python "
    assert found[0].startswith(place + "fairseq-train ") and "--distributed-world-size 16" in found[0]
    words = command(dry(tmp_path, "--ngpu", "0", "--cpu-processes", "2"), "torchrun")
    assert "--standalone" in words and value(words, "--update-freq") == "8" and "gloo" in words


def test_tables_and_precision_of_decoding(tmp_path):
    lines = dry(tmp_path, "--conf", "ds_matt_12l12l", "--ngpu", "0", "--decode-precision", "int8")
    train, generate = command(lines, "fairseq-train"), command(lines, "fairseq-generate")
    assert "--share-decoder-input-output-embed" in train and "--share-all-embeddings" not in train
    assert (value(generate, "--task"), value(generate, "--decode-precision")) == ("deep_translation", "int8")
    assert (value(generate, "--max-len-a"), value(generate, "--max-len-b")) == ("1", "50")


def test_averages_by_updates_save_by_updates(tmp_path):
    lines = dry(tmp_path, "--average-updates", "1500", "--average", "4")
    train = command(lines, "fairseq-train")
    assert (value(train, "--save-interval-updates"), value(train, "--keep-interval-updates")) == ("1500", "4")
    assert "--no-epoch-checkpoints" in train and any("average --last-updates 4 " in line for line in lines)
    assert "--save-interval-updates" not in command(dry(tmp_path), "fairseq-train")


def test_seeds_share_their_text(tmp_path):
    run_folder = tmp_path / "other"
    for seed in (4, 7):
        (run_folder / f"seed{seed}").mkdir(parents=True)
        (run_folder / f"seed{seed}/test.hyp.de").touch()
    lines = dry(tmp_path, "--seeds", "4,7", "--against", run_folder)
    assert sum(line.startswith("fairseq-preprocess") for line in lines) == 1
    trains = [shlex.split(line) for line in lines if line.startswith("fairseq-train ")]
    folders = [str(tmp_path / f"exp folder/seed{seed}/checkpoints") for seed in (4, 7)]
    assert [(value(train, "--seed"), value(train, "--save-dir")) for train in trains] == list(zip("47", folders))
    scores = [shlex.split(line) for line in lines if "--against" in line]
    assert [value(score, "--against") for score in scores] == [str(run_folder / f"seed{seed}") for seed in (4, 7)]
    assert "has several seeds: give one" in refused("--ngpu", "8", "--against", run_folder)
    assert f"{run_folder}/seed1 does not exist" in refused("--ngpu", "8", "--seeds", "2", "--against", run_folder)


def test_a_run_starts_from_another_one(tmp_path):
    run, exp = tmp_path / "other", tmp_path / "exp folder"
    (run / "checkpoints").mkdir(parents=True)
    last = run / "checkpoints/checkpoint_last.pt"
    last.touch()
    (run / "cmd.sh").touch()
    plan = Plan(driver.read_options("wmt16_ende", ["--exp", str(exp), "--ngpu", "8"])).resolve()
    words = ["--exp", exp, "--ngpu", "8", "--start-from", run]
    assert "has another text or other sub-words" in refused(*words)
    (run / ".done.3").write_text(plan.keys[3] + "\n")
    keys = [Plan(driver.read_options("wmt16_ende", [*map(str, words[:4]), *more])).resolve().keys
            for more in ([], ["--start-from", str(run)])]  # fmt: skip
    assert [one == other for one, other in zip(*keys)] == [True] * 4 + [False] * 4, "another start, another training"
    train = command(dry(tmp_path, "--start-from", run), "fairseq-train")
    assert value(train, "--finetune-from-model") == str(last) and value(train, "--task") == "translation"
    assert "stages before 4 would change that run's text" in refused(*words, "--stage", "2")
    assert "is this run itself" in refused(*words[2:], "--exp", run)
    assert "--robt fine-tunes a trained model: add --start-from RUN" in refused("--ngpu", "8", "--", "--robt")
    for words in (["--start-from", run, "--", "--robt"], ["--", "--robt", "--finetune-from-model", str(last)]):
        train = command(dry(tmp_path, *words), "fairseq-train")
        assert value(train, "--task") == "deep_translation" and value(train, "--finetune-from-model") == str(last)


def test_further_references_are_scored_with(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de", "test.de.ref1", "test.de.ref2"):
        (data / name).write_text("a\n")
    lines = dry(tmp_path, "--data", data, "--subsets", "valid,test")
    valid, test = (shlex.split(line) for line in lines if "--hypotheses" in line)
    assert (valid.count("--ref"), test.count("--ref"), test.count("--references")) == (1, 3, 3)
    assert value(test, "--ref").endswith("/text/raw/test.de.ref2")
    assert value(test, "--references").endswith("/test.ref2.de")
    tokens = [shlex.split(line) for line in lines if "--tokenized" in line or "--compound-split" in line]
    assert [words.count("--ref") for words in tokens] == [1, 1, 3, 3]
    assert value(tokens[2], "--ref").endswith("/text/bpe/test.de.ref2.tok")


@pytest.mark.parametrize("lang, tokenizer", [("zh", ["--lang", "zh"]), ("de", [])])
def test_sacrebleu_gets_the_tokenizer_of_the_target_language(lang, tokenizer, tmp_path):
    for name in ("train", "valid", "test"):
        for side in ("en", lang):
            (tmp_path / f"{name}.{side}").write_text("a\n")
    words = ["--data", tmp_path, "--source-lang", "en", "--target-lang", lang, "--exp", tmp_path / "exp", "--dry-run"]
    lines = run("--ngpu", "0", *words, script=OWN).stdout.splitlines()
    detokenised, *others = (shlex.split(line) for line in lines if line.startswith("fairseq-deep score"))
    at = detokenised.index("--detokenize") + 2
    assert (detokenised[at : at + 2] == tokenizer) == bool(tokenizer) and all("--lang" not in words for words in others)


def test_scripts_export_the_mirror_of_the_text(tmp_path, monkeypatch):
    """Another address of the text is other text, so a script without it would not resume the run."""
    monkeypatch.setenv("WMT_URL", "file:///some where")
    assert "export 'WMT_URL=file:///some where'" in scripts._environment()


def test_a_pair_of_a_multilingual_run_is_compared_with_a_run_of_pairs(tmp_path):
    other = tmp_path / "file.hyp"
    other.touch()
    line = refused("--against", other, script=ROOT / "examples/opus100/run.sh")
    assert f"--against {other} has no directory pairs: give a finished run of this recipe" in line


def test_a_limit_of_0_is_none(tmp_path):
    lines = dry(tmp_path, "--average-updates", "500", "--", "--max-update", "0", "--max-epoch", "10")
    assert any(line.startswith("time     training ends after 10 epochs") for line in lines)
    lines = dry(tmp_path, "--", "--max-update", "0", "--max-epoch", "0")
    assert any(line.startswith("time     training has no limit") for line in lines)


def test_another_product_is_refused_unless_forced(tmp_path):
    line = refused("--ngpu", "3", "--dry-run")
    assert "61,440" in line and "65,536" in line and "--force-batch true" in line
    assert "65,536" in refused("--ngpu", "8", "--update-freq", "1", "--dry-run")
    lines = dry(tmp_path, "--ngpu", "3", "--force-batch", "true")
    assert value(command(lines, "fairseq-train"), "--update-freq") == "5"


def test_the_command_line_beats_a_conf_file_and_later_files_beat_earlier_ones(tmp_path):
    own = tmp_path / "own.args"
    own.write_text("# mine\n--lr 0.5\n--beam 9\n--seed 11\n")
    lines = dry(tmp_path, "--conf", f"dlcl_30l,{own}", "--seed", "3")
    train = command(lines, "fairseq-train")
    assert (value(train, "--lr"), value(train, "--seed")) == ("0.5", "3")
    assert train.count("--lr") == 1
    assert value(command(lines, "fairseq-generate"), "--beam") == "9"


def test_flags_after_the_lone_dashes_come_last(tmp_path):
    train = command(dry(tmp_path, "--", "--lr", "1e-3", "--adam-betas", "(0.9, 0.9)"), "fairseq-train")
    assert train[-4:] == ["--lr", "1e-3", "--adam-betas", "(0.9, 0.9)"]


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_every_conf_file_is_short_and_makes_a_job(tmp_path, conf):
    script = conf.parents[1] / ("one.sh" if conf.parents[1].name == "compare" else "run.sh")
    script = script if script.exists() else MAIN
    # stock layers where the file sets their feed-forward width, which the depth-wise LSTM refuses
    arch = "transformer_lstm_6l" if script == LSTM and "ffn" not in conf.read_text() else "transformer_dlcl_30l"
    whole = [] if "--arch" in conf.read_text() else ["--arch", arch]
    weights = ["--", "--finetune-from-model", "base.pt"] if "--robt" in conf.read_text() else []
    lines = dry(tmp_path, "--conf", conf.stem, "--force-batch", *whole, *weights, script=script)
    train = command(lines, "fairseq-train")
    assert value(train, "--arch") in list_archs()
    assert len(conf.read_text().splitlines()) <= 25


def test_any_working_folder_and_relative_paths_with_blanks(tmp_path):
    folder = tmp_path / "odd $folder 'x'"
    folder.mkdir()
    lines = run("--dry-run", "--ngpu", "8", "--exp", "my exp", cwd=folder).stdout.splitlines()
    assert value(command(lines, "fairseq-train"), "--save-dir") == str(folder / "my exp" / "checkpoints")
    assert os.listdir(folder) == []


OWN = ROOT / "examples/own_text/run.sh"


@pytest.fixture
def own_text(tmp_path):
    for name in ("train", "valid", "test"):
        for lang in ("fr", "it"):
            (tmp_path / f"{name}.{lang}").write_text("une phrase de quelques mots\n" * 1000)
    (tmp_path / "train.domain").touch()
    return tmp_path


def warnings(*words, script=MAIN):
    done = run("--dry-run", *words, script=script)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("warning")]


def test_a_plan_says_what_a_cpu_cannot_do(own_text):
    data = ("--data", own_text, "--source-lang", "fr", "--target-lang", "it")
    hours, pairs = warnings("--ngpu", "0", *data)
    assert re.search(r"more than [\d,]{5,} hours on this CPU: use a GPU, or .*own_text", hours)
    assert "1,000 training pairs are few for a model of this size: examples/own_text/run.sh has smaller ones" in pairs
    assert warnings("--ngpu", "8", *data) == [pairs]
    assert warnings("--ngpu", "0", "--smoke", *data) == [] == warnings("--ngpu", "0", "--demo")
    assert warnings("--ngpu", "0", "--stage", "5", *data) == []
    assert warnings("--ngpu", "0", *data, script=OWN) == []
    assert warnings("--ngpu", "1", "--conf", "base", *data, script=OWN) == [pairs]
    assert warnings("--ngpu", "0", *data, "--", "--stop-time-hours", "1") == [pairs]
    for lang in ("fr", "it"):
        text = own_text / f"train.{lang}"
        (own_text / f"train.{lang}.gz").write_bytes(gzip.compress(text.read_bytes()))
        text.unlink()
    assert warnings("--ngpu", "8", *data) == [pairs]


@pytest.mark.parametrize("flag", ["--max-update", "--max-epoch", "--encoder-layers",
                                  "--encoder-ffn-embed-dim", "--max-source-positions"])  # fmt: skip
def test_flags_that_a_plan_counts_with_are_whole_numbers(flag):
    for value in ("1e5", "x", "-1", "08", "a[$(exit 1)]"):
        for words in ((flag, value), (f"{flag}={value}",)):
            assert refused("--", *words) == f"error: {flag} must be a whole number, not '{value}'\n"


def test_times_and_temperatures_are_numbers(tmp_path):
    for value in ("1h", "-", "nan"):
        said = f"error: --stop-time-hours must be a number, not '{value}'\n"
        assert refused("--", "--stop-time-hours", value) == said
    assert command(dry(tmp_path, "--", "--stop-time-hours", ".5"), "fairseq-train")[-1] == ".5"
    script = ROOT / "examples/opus100/run.sh"
    assert "--temperature must be more than 0" in checked(script, "--temperature", "0.0").stderr


def test_own_text_is_dlcl_at_the_size_that_is_asked_for(own_text, tmp_path):
    data = ("--data", own_text, "--source-lang", "fr", "--target-lang", "it", "--exp", tmp_path / "exp", "--dry-run")
    for conf, arch, width in (("mini", "transformer_dlcl_12l", "192"), ("base", "transformer_dlcl_20l_iwslt", None)):
        lines = run("--ngpu", "1", "--conf", conf, *data, script=OWN).stdout.splitlines()
        train = command(lines, "fairseq-train")
        assert value(train, "--arch") == arch
        assert width is None or value(train, "--encoder-embed-dim") == width
    line = refused("--data", own_text, script=OWN)
    assert "test.en is missing" in line and "; it has fr it: give --source-lang and --target-lang" in line


def test_deep_shallow_and_its_teacher_are_those_of_the_results_page(own_text, tmp_path):
    """The printed command of the teacher trains 6 + 6 plain layers of the student's size and schedule."""
    data = ("--data", own_text, "--source-lang", "fr", "--target-lang", "it", "--exp", tmp_path / "exp", "--dry-run")
    page = OWN.with_name("README.md").read_text()
    arch, flags = re.search(r"deep_shallow (--arch .*)--exp exp/teacher \\\n +(-- .*)", page).groups()
    student, teacher = (
        command(run("--ngpu", "0", "--conf", "deep_shallow", *own.split(), *data, *after.split(), script=OWN)
                .stdout.splitlines(), "fairseq-train")
        for own, after in (("", ""), (arch, flags))
    )  # fmt: skip
    both = {"--lr": "0.002", "--warmup-updates": "600", "--max-update": "12000", "--max-tokens": "512",
            "--encoder-embed-dim": "128", "--encoder-ffn-embed-dim": "512", "--deep-init": "xavier"}  # fmt: skip
    for flag, expected in both.items():
        assert value(student, flag) == value(teacher, flag) == expected, flag
    own = [(value(words, "--arch"), value(words, "--decoder-layers")) for words in (student, teacher)]
    assert own == [("transformer_modern_12l1l", "1"), ("transformer_prenorm_6l", "6")]


@pytest.mark.parametrize("updates, words", [
    ("20", "20 updates = 0.1 million tokens: 1 min at 100,000 tokens/s, 1 min at 10,000, 2 min at 1,000"),
    ("3000", "3000 updates = 12 million tokens: 3 min at 100,000 tokens/s, 21 min at 10,000, 3 h at 1,000"),
])  # fmt: skip
def test_the_time_of_a_job_is_never_nothing(updates, words):
    given = ["--ngpu", "0", "--max-tokens", "4096", "--batch-tokens", "4096", "--", "--max-update", updates]
    assert f"time     {words}" in run("--dry-run", *given).stdout.splitlines()


def test_a_smoke_run_has_room_for_a_cooldown(tmp_path):
    plain, cooling = (command(dry(tmp_path, "--smoke", *flags), "fairseq-train")
                      for flags in ([], ["--", "--lr-scheduler", "inverse_sqrt_cooldown"]))  # fmt: skip
    flags = ("--max-update", "--warmup-updates", "--cooldown-updates")
    assert [value(cooling, flag) for flag in flags] == ["20", "4", "4"]
    assert "--cooldown-updates" not in plain
