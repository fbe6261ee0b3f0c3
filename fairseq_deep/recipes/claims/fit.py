"""Table 4 of Zhang et al., 2019: BLEU and perplexity on a sample of the training text, and on the development text.

BLEU is computed on detokenised text on both sides, perplexity by ``fairseq-validate``. Results are stored in
``fit.json`` in the run's directory, and measured again if the run was resumed.
"""

import json
import os
import random
import shutil
import sys

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.options import ROOT
from fairseq_deep.recipes.record import read_json
from fairseq_deep.tools import write_text

from .speed import find, generate_command, model_sum, run

PAIRS = {"mini": 1000, "base": 3000}  # the paper has 3,000


def measure(records, args):
    """Return {label: {"train_bleu", "dev_bleu", "train_ppl", "dev_ppl"}} of the first seed, and a list of problems."""
    found, problems = {}, []
    for record in records:
        if not record["done"]:
            continue
        folder = record["folders"][record["done"][0]]
        path = os.path.join(folder, "fit.json")
        kept, model = read_json(path), model_sum(folder)
        if kept.get("model") != model and not args.table_only:
            print(f"{record['label']}: training and development text", flush=True)
            try:
                kept = {"model": model, **_measure_one(folder, args)}
            except UsageError as problem:
                problems.append(str(problem))
                continue
            write_text(path, json.dumps(kept, indent=1) + "\n")
        if kept.get("model") == model:
            found[record["label"]] = kept
    return found, problems


def _measure_one(folder, args):
    data = os.path.join(folder, "fit-data")
    try:
        _binarise(folder, data, args)
        figures = {}
        for subset, name in (("test", "train"), ("test1", "dev")):
            figures[f"{name}_bleu"] = _bleu(folder, data, subset, args.target_lang)
            figures[f"{name}_ppl"] = _perplexity(folder, data, subset)
        return figures
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _binarise(folder, data, args):
    """Binarise a sample of the training pairs, the same for all systems, as "test", and the valid set as "test1"."""
    text, languages = os.path.join(folder, "text", "bpe"), (args.source_lang, args.target_lang)
    os.makedirs(data, exist_ok=True)
    with open(os.path.join(text, f"train.{languages[0]}"), encoding="utf-8") as stream:
        count = sum(1 for _ in stream)
    chosen = set(random.Random(1).sample(range(count), min(PAIRS[args.scale], count)))
    for language in languages:
        with open(os.path.join(text, f"train.{language}"), encoding="utf-8") as stream:
            lines = [line for number, line in enumerate(stream) if number in chosen]
        write_text(os.path.join(data, f"sample.{language}"), "".join(lines))
    words = ["fairseq-preprocess", "--source-lang", languages[0], "--target-lang", languages[1]]
    words += ["--srcdict", os.path.join(folder, "data-bin", f"dict.{languages[0]}.txt"), "--joined-dictionary"]
    words += ["--testpref", f"{os.path.join(data, 'sample')},{os.path.join(text, 'valid')}", "--destdir", data]
    run(words, folder, "fairseq-preprocess")


def _bleu(folder, data, subset, language):
    command = generate_command(folder, subset)
    command[1] = data
    output = os.path.join(data, f"{subset}.txt")
    write_text(output, run(command, folder, "fairseq-generate"))
    score = [sys.executable, "-m", "fairseq_deep", "score", "--generate-output", output, "--detokenize", language]
    return float(find(r"^BLEU = ([\d.]+)", run(score, folder, "fairseq-deep score"), folder, "BLEU"))


def _perplexity(folder, data, subset):
    words = ["fairseq-validate", data, "--user-dir", os.path.join(ROOT, "fairseq_deep"), "--task", "translation"]
    words += ["--path", os.path.join(folder, "averaged.pt"), "--valid-subset", subset, "--max-tokens", "4000"]
    words += ["--log-format", "simple", "--cpu"]
    said = run(words, folder, "fairseq-validate")
    return float(find(r"\| ppl ([\d.]+(?:e\+\d+)?|nan|inf)", said, folder, "perplexity"))
