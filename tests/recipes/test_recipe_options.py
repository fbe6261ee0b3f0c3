"""The options of the recipes: what is refused and warned of, and what they do that no plan of tests/snapshots shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from fairseq_deep.cli import main
from fairseq_deep.recipes import commands, driver, scripts
from fairseq_deep.recipes.plan import Plan
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, checked

IWSLT, OWN = (ROOT / f"examples/{name}/run.sh" for name in ("iwslt14_deen", "own_text"))


def run(*words, script=MAIN):
    """A plan of a machine with 8 GPUs, or of --ngpu, in this process."""
    return checked(script, *([] if "--ngpu" in words else ["--ngpu", "8"]), *words)


def planned(*words, **how):
    """The lines of a dry run."""
    done = run("--dry-run", *words, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def command(lines, name):
    """The words of the first command called *name*."""
    return next(words for words in map(shlex.split, (x for x in lines if x.startswith(name))) if words[0] == name)


def value(words, flag):
    """The value that argparse would take: the last one."""
    return words[len(words) - words[::-1].index(flag)]


def test_the_command_line_overrides_conf_files_and_later_files_earlier_ones(tmp_path):
    own = tmp_path / "own.args"
    own.write_text("# mine\n--lr 0.5\n--beam 9\n--seed 11\n")
    confs = ["--conf", f"dlcl_30l,{own}"]
    lines = planned(*confs, "--seed", "3", "--seed=3", "--exp", tmp_path / "exp")
    train = command(lines, "fairseq-train")
    assert (value(train, "--lr"), value(train, "--seed"), train.count("--lr")) == ("0.5", "3", 1)
    assert value(command(lines, "fairseq-generate"), "--beam") == "9" and os.listdir(tmp_path) == ["own.args"]
    shown = run("--help", *confs, "--beam", "7").stdout
    assert re.search(r"--beam N +beam width \[7\]\n", shown) and re.search(r"--seed N +random seed \[11\]\n", shown)


def test_the_commands_of_fairseq_deep_are_the_scripts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_DEEP_ENV", "current")
    words = ["--dry-run", "--ngpu", "8", "--exp", str(tmp_path / "exp"), "--force-batch"]
    same = run(*words, script=IWSLT).stdout
    assert main(["recipe", "iwslt14_deen", *words]) == 0
    assert capsys.readouterr().out == same and "fairseq-train" in same
    assert main(["recipe", "--help"]) == 0 and "TASK: compare, depthwise_lstm" in capsys.readouterr().out
    assert main(["compare", "--help"]) == 0 and "--halves" in capsys.readouterr().out
    rows = [(["recipe", "wmt16_ende", "--baem", "4"], "did you mean --beam?"),
            (["recipe", "wmt16_endd"], "unknown recipe wmt16_endd (did you mean wmt16_ende?)"),
            (["compare", "prenorm_6l"], "--data is missing")]  # fmt: skip
    for line, problem in rows:
        assert main(line) == 2 and problem in capsys.readouterr().err
    monkeypatch.setattr(commands, "EXAMPLES", str(tmp_path / "examples"))
    for line in (["recipe", "wmt16_ende"], ["compare", "dlcl_6l"]):
        said = f"fairseq-deep {line[0]}: no recipes in {tmp_path}/examples; run this in a clone of the repository\n"
        assert (main(line), capsys.readouterr().err) == (2, said)


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
    files = {"fairseq.py": "", "fairseq_deep/__init__.py": "", "root/fairseq_deep/__init__.py": "",
             "root/examples/common/env.sh": (ROOT / "examples/common/env.sh").read_text()}  # fmt: skip
    changes = {"fairseq": ("fairseq.py", "raise ImportError"), "the same code": ("fairseq_deep/new.py", ""),
               "fairseq_deep": ("fairseq_deep/__init__.py", "raise ImportError")}  # fmt: skip
    files.update([changes[lacks]] if lacks else [])
    for name, content in {"bin/python": "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    program = tmp_path / "bin/python"
    program.write_text(f'#!/usr/bin/env bash\necho call >> {tmp_path}/calls\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "FAIRSEQ_DEEP_ENV": "current", "PATH": path, "PYTHONPATH": str(tmp_path)}
    once = f". '{tmp_path}/root/examples/common/env.sh'; ensure_env"
    script = f'{once} && bash -c "{once}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment,
                          cwd=tmp_path / "root")  # fmt: skip
    assert done.returncode == (1 if lacks else 0) and said in done.stderr and done.stderr.count("\n") == bool(lacks)
    assert (tmp_path / "calls").read_text().count("call") == 1


def test_a_script_runs_in_any_directory_and_names_a_missing_python(tmp_path):
    folder, programs = tmp_path / "odd $folder 'x'", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (tmp_path / "examples").mkdir()
    given = {"capture_output": True, "text": True, "cwd": folder, "timeout": 300}
    words = [MAIN, "--dry-run", "--ngpu", "8", "--exp", "my exp"]
    done = subprocess.run(words, env={**os.environ, "CDPATH": f"{tmp_path}:."}, **given)
    train = command(done.stdout.splitlines(), "fairseq-train")
    assert done.stderr == "" and os.listdir(folder) == []
    assert value(train, "--save-dir") == str(folder / "my exp/checkpoints")
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name))
    done = subprocess.run(words, env={"PATH": str(programs), "FAIRSEQ_DEEP_ENV": "current"}, **given)
    assert (done.returncode, done.stderr) == (1, "set-up: no python in PATH; activate an environment\n")


def test_another_run_is_compared_seed_by_seed(tmp_path):
    for seed in (4, 7):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}/test.hyp.de").touch()
    scores = [shlex.split(line) for line in planned("--seeds", "4,7", "--against", tmp_path) if "--against" in line]
    assert [value(score, "--against") for score in scores] == [str(tmp_path / f"seed{seed}") for seed in (4, 7)]


def test_a_run_starts_from_another_one(tmp_path):
    other, exp = tmp_path / "other", tmp_path / "exp folder"
    (other / "checkpoints").mkdir(parents=True)
    last = other / "checkpoints/checkpoint_last.pt"
    last.touch()
    (other / "cmd.sh").touch()
    given = ["--exp", str(exp), "--ngpu", "8"]
    started = [*given, "--start-from", str(other)]
    own = Plan(driver.read_options("wmt16_ende", given)).resolve().keys
    (other / ".done.3").write_text(own[3] + "\n")
    keys = Plan(driver.read_options("wmt16_ende", started)).resolve().keys
    assert [one == another for one, another in zip(own, keys)] == [True] * 4 + [False] * 4, "another training"
    assert "stages before 4 would change that run's text" in run(*started, "--stage", "2").stderr
    for words, task in (([], "translation"), (["--", "--robt"], "deep_translation")):
        train = command(planned(*started, *words), "fairseq-train")
        assert (value(train, "--finetune-from-model"), value(train, "--task")) == (str(last), task)


def write_text(folder, *langs):
    for name in ("train", "valid", "test"):
        for lang in langs:
            (folder / f"{name}.{lang}").write_text("une phrase de quelques mots\n")
    return ["--data", folder, "--source-lang", langs[0], "--target-lang", langs[1]]


def test_further_references_are_scored_with(tmp_path):
    words = write_text(tmp_path, "en", "de")
    for number in (1, 2):
        (tmp_path / f"test.de.ref{number}").touch()
    lines = planned(*words, "--subsets", "valid,test")
    valid, test = (shlex.split(line) for line in lines if "--hypotheses" in line)
    assert (valid.count("--ref"), test.count("--ref"), test.count("--references")) == (1, 3, 3)
    assert value(test, "--ref").endswith("/text/raw/test.de.ref2")
    assert value(test, "--references").endswith("/test.ref2.de")
    tokens = [shlex.split(line) for line in lines if "--tokenized" in line or "--compound-split" in line]
    assert [words.count("--ref") for words in tokens] == [1, 1, 3, 3]
    assert value(tokens[2], "--ref").endswith("/text/bpe/test.de.ref2.tok")


def test_chinese_is_scored_with_its_tokenizer(tmp_path):
    lines = planned(*write_text(tmp_path, "en", "zh"), "--ngpu", "0", script=OWN)
    detokenised, *others = (line for line in lines if line.startswith("fairseq-deep score"))
    assert " --detokenize zh --lang zh " in detokenised and all("--lang" not in line for line in others)


def test_scripts_export_the_mirror_of_the_text(monkeypatch):
    """Another address of the text is other text, so a script without it would not resume the run."""
    monkeypatch.setenv("WMT_URL", "file:///some where")
    assert "export 'WMT_URL=file:///some where'" in scripts._environment()


PLAIN = "fairseq's transformer, CTranslate2, transformers"


@pytest.mark.parametrize("words, formats", [
    ((), f"torch (.pt2), package; not {PLAIN} (--layer-agg dlcl)"),
    (("--conf", "base_prenorm"), f"torch (.pt2), package, {PLAIN}"),
    (("--conf", "base_prenorm", "--", "--rotary-positions"),
     "torch (.pt2), package, CTranslate2; not fairseq's transformer, transformers (--rotary-positions)"),
    (("--arch", "transformer"), None),
])  # fmt: skip
def test_a_plan_names_the_formats_of_export(words, formats):
    found = [line for line in planned(*words) if line.startswith("exports ")]
    assert found == ([f"exports  {formats}"] if formats else [])


@pytest.mark.parametrize("words, warning", [
    (("--", "--max-update", "300"), "training ends within its warm-up (--max-update 300, --warmup-updates 16000)"),
    (("--conf", "base_prenorm", "--", "--max-update", "8001"), None),
    (("--ngpu", "0"), "this job is for GPUs, and takes weeks on a CPU: for your own text use examples/own_text/run.sh"),
    (("--ngpu", "0", "--stage", "5"), None), (("--ngpu", "0", "--demo"), None),
    (("--against", "/no/such/run"), "--against /no/such/run: no such run or file"),
    (("--teacher", "/no/such/run"), "--teacher /no/such/run: no such run, checkpoint or package"),
    (("--temperature", "2"), "--temperature has no effect for one language pair"),
    (("--bpe", "sentencepiece", "--max-words", "9"),
     "--max-words has no effect with --bpe sentencepiece: use --max-subwords"),
    (("--ngpu", "0", "--demo", "--checksums", "none"), "--checksums has no effect without a download"),
    (("--against", str(ROOT / "docs")), f"--against: {ROOT}/docs/test.hyp.de does not exist"),
])  # fmt: skip
def test_a_plan_warns_of_what_a_run_rejects_or_trains_badly(words, warning):
    """A dry run may precede the run that it names."""
    found = [line for line in planned(*words) if line.startswith("warning ")]
    assert len(found) == bool(warning) and all(line.startswith(f"warning  {warning}") for line in found)


def test_deep_shallow_and_its_teacher_are_those_of_the_results_page(tmp_path):
    """The printed command of the teacher trains 6 + 6 plain layers of the student's size and schedule."""
    data = ["--ngpu", "0", "--conf", "deep_shallow", *write_text(tmp_path, "fr", "it")]
    page = OWN.with_name("README.md").read_text()
    arch, flags = re.search(r"deep_shallow (--arch .*)--exp exp/teacher \\\n +(-- .*)", page).groups()
    student = command(planned(*data, script=OWN), "fairseq-train")
    teacher = command(planned(*data, *arch.split(), *flags.split(), script=OWN), "fairseq-train")
    both = {"--lr": "0.002", "--warmup-updates": "600", "--max-update": "12000", "--max-tokens": "512",
            "--encoder-embed-dim": "128", "--encoder-ffn-embed-dim": "512", "--deep-init": "xavier"}  # fmt: skip
    for flag, expected in both.items():
        assert value(student, flag) == value(teacher, flag) == expected, flag
    own = [(value(words, "--arch"), value(words, "--decoder-layers")) for words in (student, teacher)]
    assert own == [("transformer_modern_12l1l", "1"), ("transformer_prenorm_6l", "6")]
