"""The ``fairseq-train`` and ``fairseq-generate`` commands of the pages: each page's, in order, with tiny models."""

import re

import pytest

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.commands import losses, run
from tests.helpers.docs import PAGES, command_lines
from tests.helpers.flags import parse
from tests.helpers.models import task_of
from tests.helpers.paths import PACKAGE, ROOT

PROGRAMS = ("fairseq-train", "fairseq-generate")
TESTED_ELSEWHERE = {
    "docs/alignments.md": "test_learning.py",  # its text has alignments
    "docs/methods/languages.md": "test_package.py",  # its sources have language tags
    "docs/methods/robt.md": "test_backtranslation.py",
    "docs/tools/import.md": "test_export_huggingface.py",  # its weights come from transformers
    "examples/own_text/tutorial.md": "test_tutorial.py",
}
SHORTER = {"docs/training-options.md": ["--warmup-updates", "1", "--cooldown-updates", "1"]}
ARCHIVES = ("docs/results/", "benchmarks/results/")  # what was run once
TRAINING = ["--optimizer", "adam", "--lr", "1e-3", "--criterion", "label_smoothed_cross_entropy"]
TINY = ["--encoder-embed-dim", "16", "--decoder-embed-dim", "16", "--encoder-attention-heads", "2",
        "--decoder-attention-heads", "2", "--max-tokens", "150", "--max-update", "2", "--cpu", "--num-workers", "0",
        "--log-format", "json", "--log-interval", "1"]  # fmt: skip
# made by a command before this one, or on another page
CHECKPOINTS = {"stock.pt", "CHECKPOINT", "exp/demo/averaged.pt", "EXP/averaged.pt"}


def commands(page):
    """The commands of a page in its order."""
    lines = [words for program in PROGRAMS for words in command_lines(page, program)]
    return [[word for word in words if word != "..."] for words in lines]


def to_run(words, data, *more):
    """The command with this data, this package, and sizes and updates of tests; fp16 would need a GPU."""
    words = [word for word in words if word != "--fp16"]
    program, _, *flags = (PACKAGE if word == "$(fairseq-deep path)" else word for word in words)
    if program == "fairseq-generate":
        flags = ["checkpoints/checkpoint_best.pt" if word in CHECKPOINTS else word for word in flags]
        return [program, data, *flags, "--cpu", "--gen-subset", "valid"]
    return [program, data, *TRAINING, *flags, *TINY, *more]


WITH_COMMANDS = [page for page in map(str, PAGES) if not page.startswith(ARCHIVES) and commands(page)]


def only_trains(page):
    """Whether the page is about methods, and its trainings begin with new models."""
    return page.startswith("docs/methods/") and {words[0] for words in commands(page)} == {PROGRAMS[0]} and not any(
        "--init-from" in words for words in commands(page))  # fmt: skip


@pytest.mark.parametrize("page", filter(only_trains, WITH_COMMANDS))
def test_the_models_of_a_page_of_methods_are_built(page, dictionary):
    """From its commands; at night they train."""
    for words in commands(page) if page not in TESTED_ELSEWHERE else ():
        place = words.index("--user-dir")
        args = parse(*map(str, to_run(words[:place] + words[place + 2 :], "data")[2:]))
        DeepTransformerModel.build_model(args, task_of(dictionary))


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[pytest.mark.nightly] if only_trains(page) else []) for page in WITH_COMMANDS
    if page not in TESTED_ELSEWHERE
])  # fmt: skip
def test_the_commands_of_a_page_run(small, tmp_path, page):
    programs = [words[0] for words in commands(page)]
    generates = "fairseq-generate" in programs
    if generates and "fairseq-train" not in programs:
        run(*to_run(["fairseq-train", "DATA", "--user-dir", str(PACKAGE), "--arch", "transformer_dlcl_2l2l_tiny"],
                    small), cwd=tmp_path)  # fmt: skip
    for number, words in enumerate(commands(page)):
        if words[0] == "fairseq-generate":
            done = run(*to_run(words, small), cwd=tmp_path)
            assert len(re.findall(r"(?m)^H-\d+\t", done.stdout)) >= 8, words
            continue
        own = [*SHORTER.get(page, ())]
        own += [] if generates or "--save-dir" in words else ["--no-save", "--disable-validation"]
        own += ["--save-dir", f"run{number}"] if number and "--save-dir" not in words else []
        assert sorted(losses(run(*to_run(words, small, *own), cwd=tmp_path))) == [1, 2], words


def test_other_tests_run_the_rest():
    assert all(any((ROOT / "tests").rglob(name)) for name in TESTED_ELSEWHERE.values())
