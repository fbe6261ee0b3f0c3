"""A small model as a recipe leaves it."""

import json
import random
import shutil
import sys

from tests.helpers.commands import run, train_command
from tests.helpers.paths import PROGRAMS
from tests.helpers.recipes import WORDS


def write_text(folder, rng):
    """Pairs of three sets in *folder*: a few words in any order."""
    folder.mkdir(parents=True)
    for split, count in (("train", 200), ("valid", 10), ("test", 40)):
        pairs = [[rng.choice(list(WORDS.items())) for _ in range(rng.randint(2, 6))] for _ in range(count)]
        for lang, side in (("en", 0), ("de", 1)):
            lines = [" ".join(word[side] for word in pair).capitalize() + rng.choice(".!") for pair in pairs]
            (folder / f"{split}.{lang}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train_recipe(exp, *dictionaries, **training):
    """Fill *exp* as the stages of a recipe do, with two checkpoints of a small model.

    Args:
        dictionaries: flags of fairseq-preprocess
        training: arguments of :func:`train_command`
    """
    write_text(exp / "text/raw", random.Random(3))
    languages = ["--source-lang", "en", "--target-lang", "de"]
    run(sys.executable, PROGRAMS, "subwords", *languages, "--text", exp / "text/raw", "--out", exp / "text/bpe",
        "--merges", "30", "--max-words", "50")  # fmt: skip
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", exp / "text/bpe" / split)]
    run("fairseq-preprocess", *languages, *prefixes, "--destdir", exp / "data-bin", *dictionaries)
    positions = ["--max-source-positions", "24", "--max-update", "240", "--save-interval-updates", "110"]
    positions += ["--no-epoch-checkpoints", "--validate-interval", "100", "--lr", "5e-3"]
    run(*train_command(exp / "data-bin", exp / "checkpoints", *languages, *positions, **training))
    shutil.copy(exp / "checkpoints/checkpoint_last.pt", exp / "averaged.pt")
    (exp / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8}))
