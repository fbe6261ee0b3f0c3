"""What the tests of ``examples`` share: text and programs."""

import os
import random
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.recipes import MAIN, SMALL, STUB, WORDS, driven, make_real, write_pairs, write_program


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """The first folder of PATH, with this Python; the environment is ready for recipes on the CPU."""
    folder = tmp_path / "bin"
    path = os.pathsep.join((str(folder), os.path.dirname(sys.executable), os.environ["PATH"]))
    for name, value in {"PATH": path, "FAIRSEQ_DEEP_ENV": "current", "FAIRSEQ_DEEP_CHECKED": str(folder / "python"),
                        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    folder.mkdir()
    for name in ("python", "python3"):
        write_program(folder / name, f'exec {sys.executable} "$@"')
    return folder


@pytest.fixture
def programs(tools):
    """The same folder, with programs in forks, and no look at the machine."""
    make_real(tools)
    return tools


@pytest.fixture
def corpus(tmp_path):
    """200 word-for-word pairs for training, with two broken ones; a test set with an empty line."""
    folder, rng = tmp_path / "parallel text", random.Random(5)
    draw = lambda: " ".join(rng.choice(list(WORDS)) for _ in range(rng.randint(3, 7)))  # noqa: E731
    pairs = [(en, " ".join(map(WORDS.get, en.split()))) for en in (draw() for _ in range(220))]
    tests = [*pairs[210:213], ("", "leer"), *pairs[213:220]]
    write_pairs(folder, train=[*pairs[:200], ("", "leer"), ("empty", " ")], valid=pairs[200:210], test=tests)
    return folder


@pytest.fixture
def stubs(tools, tmp_path, monkeypatch):
    """Replace fairseq's programs by ``STUB``; return the file with the calls."""
    for name in ("fairseq-preprocess", "fairseq-train", "fairseq-generate", "fairseq-deep"):
        write_program(tools / name, STUB)
    write_program(tools / "python", "exit 0")  # asked only whether fairseq can be imported
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("CALLS", str(calls))
    return calls


@pytest.fixture
def job(stubs, corpus, tmp_path):
    """job(WORD, ...): the ended recipe for *corpus* in tmp_path/exp, unless a WORD says otherwise, with stubs."""
    return lambda *words: driven(MAIN, "--data", corpus, "--exp", tmp_path / "exp", *SMALL, *words)


@pytest.fixture
def comparison(corpus, tmp_path):
    """comparison(WORD, ...): the command that compares systems in tmp_path/exp, unless a WORD says otherwise."""
    fixed = ("--data", corpus, "--exp", tmp_path / "exp", "--ngpu", "0", "--workers", "1", "--width", "16",
             "--heads", "2", "--updates", "4")  # fmt: skip
    return lambda *words: [str(word) for word in (ROOT / "examples/compare/run.sh", *fixed, *words)]


@pytest.fixture
def compare(comparison, tools):
    """compare(WORD, ...): the ended command, in this process."""
    return lambda *words: driven(*comparison(*words))
