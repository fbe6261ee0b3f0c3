"""Recipes as they are run: their text, programs in the place of those that they call, what they say."""

import contextlib
import io
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

from fairseq_deep import cli
from tests.helpers.forkserver import SCRIPTS, stand_in
from tests.helpers.hostile import archive, member
from tests.helpers.paths import ROOT
from tests.helpers.processes import until

MAIN = ROOT / "run_wmt16_ende.sh"
SMALL = ("--conf", "mini", "--bpe-merges", "50", "--workers", "1")
LANGS = ("en", "de")
WORDS = dict(
    pair.split(":") for pair in "the:das house:Haus is:ist green:grün not:nicht old:alt we:wir see:sehen".split()
)


def write_program(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def driven(script, *words):
    """The ended command of *script*, run in this process."""
    line = [*re.search(r'/start\.sh" (.*) "\$@"', Path(script).read_text())[1].split(), *map(str, words)]
    out, errors = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), mock.patch.dict(os.environ):
        status = cli.main(line)
    return subprocess.CompletedProcess(line, status, *(each.buffer.getvalue().decode() for each in (out, errors)))


def checked(script, *words):
    """The ended driver of a recipe that is refused or prints a plan."""
    with mock.patch("fairseq_deep.recipes.driver.prepare", side_effect=AssertionError(f"it runs: {words}")):
        return driven(script, *words)


def assert_refused(done, *parts, status=2):
    """One line on stderr, and nothing that looks like a result."""
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(f"fairseq-deep {done.args[0]}: ") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


# A stand-in for every program of stages 0 and 3 to 7: it records its call and leaves what the next stage needs.
STUB = r"""
name=${0##*/}
printf '%s\n' "$name $*" >>"$CALLS"
argument() {
  local flag=$1 previous='' word
  shift
  for word; do
    [[ $previous == "$flag" ]] && printf %s "$word"
    previous=$word
  done
}
case $name in
  fairseq-preprocess) mkdir -p "$(argument --destdir "$@")" ;;
  fairseq-train)
    folder=$(argument --save-dir "$@")
    mkdir -p "$folder"
    touch "$folder/checkpoint_last.pt" "$folder/checkpoint1.pt" "$folder/checkpoint2.pt"
    [[ ! -e $CALLS.hang ]] || { echo $$ >"$CALLS.hanging"; exec sleep 300; }
    [[ ! -e $CALLS.fail ]] || { echo "ValueError: planted"; exit 1; } ;;
  fairseq-generate) for ((i = 0; i < 11; i++)); do printf 'S-%d\ta\nT-%d\tb\nH-%d\t-0.1\tb\n' $i $i $i; done ;;
  fairseq-deep)
    [[ $1 == average ]] && touch "$(argument --output "$@")"
    [[ $1 == score ]] && printf '{"bleu": 12.34, "signature": "s"}' >"$(argument --json "$@")"
    [[ $* == *--hypotheses* ]] || exit 0
    printf 'b\n' >"$(argument --hypotheses "$@")"
    printf 'b\n' >"$(argument --references "$@")" ;;
esac
"""


def programs(calls):
    """The programs called so far, in order; clears the list."""
    called = [line.split() for line in calls.read_text().splitlines()]
    calls.write_text("")
    return [" ".join(words[: 2 if words[0] == "fairseq-deep" else 1]) for words in called]


def begun(command, calls, **how):
    """A started *command* whose training hangs, and the number of the training's process."""
    hanging, how = Path(f"{calls}.hanging"), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **how}
    child = subprocess.Popen(list(map(str, command)), **how)
    return child, int(until(lambda: hanging.exists() and hanging.read_text()))


def write_pairs(folder, **splits):
    """Files SPLIT.LANG of lists of pairs."""
    folder.mkdir(exist_ok=True, parents=True)
    for split, pairs in splits.items():
        for lang, side in zip(LANGS, zip(*pairs)):
            (folder / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def make_real(tools, train=""):
    """Let fairseq's programs, and ours but for its look at the machine, run in forks.

    Args:
        train: flags that fairseq-train gets after its own
    """
    for name in SCRIPTS:
        more = f'set -- "$@" {train}\n' if train and name == "fairseq-train" else ""
        write_program(tools / name, f"{more}[[ $1 != doctor ]] || exit 0\n{stand_in(name)}")


def fork_drivers(tools):
    """Let drivers, which import fairseq, run in forks: none is killed."""
    driver = f"[[ $1 != */recipes/__main__.py ]] || {stand_in('python3')}"
    write_program(tools / "python3", f'{driver}\nexec {sys.executable} "$@"')


def pack(path, files, mode="w:gz"):
    """Write a tar archive of ``{name: text or bytes}``."""
    archive(path, *(member(name, content) for name, content in files.items()), mode=mode)
