"""A small model as a recipe leaves it."""

import json
import random
import shutil
from types import SimpleNamespace

from fairseq_deep.recipes.recipe import Recipe
from fairseq_deep.recipes.text import subwords
from tests.helpers.commands import run, train_command
from tests.helpers.recipes import WORDS, write_pairs


def write_text(folder, rng):
    """Pairs of three sets in *folder*: a few words in any order."""
    for split, count in (("train", 200), ("valid", 10), ("test", 40)):
        pairs = [[rng.choice(list(WORDS.items())) for _ in range(rng.randint(2, 6))] for _ in range(count)]
        sides = [[" ".join(word[side] for word in pair).capitalize() + rng.choice(".!") for pair in pairs]
                 for side in (0, 1)]  # fmt: skip
        write_pairs(folder, **{split: zip(*sides)})


def train_recipe(exp, *dictionaries, **training):
    """Fill *exp* as the stages of a recipe do, with two checkpoints of a small model.

    Args:
        dictionaries: flags of fairseq-preprocess
        training: arguments of :func:`train_command`
    """
    write_text(exp / "text/raw", random.Random(3))
    languages = ["--source-lang", "en", "--target-lang", "de"]
    options = Recipe(source_lang="en", target_lang="de", bpe="joint", bpe_merges=30, max_words=50, workers=1)
    plan = SimpleNamespace(options=options, langs=("en", "de"))
    subwords.cut_corpus(str(exp / "text/raw"), str(exp / "text/bpe"), plan)
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", exp / "text/bpe" / split)]
    run("fairseq-preprocess", *languages, *prefixes, "--destdir", exp / "data-bin", *dictionaries)
    positions = ["--max-source-positions", "24", "--max-update", "240", "--save-interval-updates", "110"]
    positions += ["--no-epoch-checkpoints", "--validate-interval", "100", "--lr", "5e-3"]
    run(*train_command(exp / "data-bin", exp / "checkpoints", *languages, *positions, **training))
    shutil.copy(exp / "checkpoints/checkpoint_last.pt", exp / "averaged.pt")
    (exp / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8}))
