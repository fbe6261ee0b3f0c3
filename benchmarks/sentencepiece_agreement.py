"""Does a tokenizer exported for transformers cut text as SentencePiece does? Lines with other indices, by kind of text.

    pip install sentencepiece protobuf transformers
    python benchmarks/sentencepiece_agreement.py --text train.en train.de

For each algorithm and normalisation, a model is learned on the first 20,000 lines of each file and on words of many
scripts. Its dictionary lacks pieces that occur once, and has pieces of characters that are unknown. Compared are the
next 2,000 lines of each file, words of the same scripts, random characters, and decomposed text (NFD). A line counts as
a tie if it has the same pieces in another order; all other differences are failures.
"""

import argparse
import collections
import itertools
import os
import random
import tempfile
import unicodedata

import sentencepiece

from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.text import cutter_of
from fairseq_deep.tools import huggingface_tokenizer
from fairseq_deep.tools.tables import format_table

LEARNED, COMPARED = 20_000, 2_000
SCRIPTS = ("abcdefghijklmnop", "äöüßéñ", "абвгд", "αβγ", "漢字仮名", "0123456789", "@&;#'-.,!?<>", "😀🎉", "e\u0301",
           "אבג", "ქართ", "हिन्दी", "한국어", "ẤộỮ", "ｶﾞﾊﾟ")  # fmt: skip
RULES = (("nmt_nfkc", False), ("nmt_nfkc_cf", False), ("identity", False), ("nmt_nfkc", True))


def words_of_scripts(count, seed):
    """Lines of words of one script each; some words come back often."""
    draws = random.Random(seed)
    common = ["".join(draws.choices(draws.choice(SCRIPTS), k=draws.randint(1, 7))) for _ in range(60)]
    rare = lambda: "".join(draws.choices(draws.choice(SCRIPTS), k=draws.randint(1, 9)))  # noqa: E731
    return [" ".join([*draws.choices(common, k=draws.randint(1, 8)), rare()]) for _ in range(count)]


def random_characters(count):
    draws = random.Random(1)
    pool = [chr(code) for code in range(0x20, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    low = [letter for letter in pool if ord(letter) < 0x3400]
    return ["".join(draws.choices(draws.choice([low, pool]), k=draws.randint(1, 12))) + " abc" for _ in range(count)]


def learn(path, lines, algorithm, rule, fallback, size):
    """Learn a model; return the function that cuts a line, its pieces and its dictionary."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=path, vocab_size=size, character_coverage=0.9995, minloglevel=2,
        model_type=algorithm, byte_fallback=fallback, normalization_rule_name=rule, hard_vocab_limit=False,
    )  # fmt: skip
    cut = cutter_of(f"{path}.model")
    counts = collections.Counter(unit for line in lines for unit in cut(line).split())
    units = [unit for unit, count in counts.items() if count > 1 and not unit.startswith(("<s>", "</s>", "<unk>"))]
    return cut, huggingface_tokenizer.read_subwords(f"{path}.model"), Dictionary(units)


def compare(cut, pieces, dictionary, lines):
    """Return how many *lines* are ties, and how many fail."""
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(dictionary.symbols, pieces)
    tokenizer = huggingface_tokenizer.make_tokenizer(vocabulary, pieces, 10**6)
    means = [*range(len(dictionary)), *meanings]
    ties = failures = 0
    for line, row in zip(lines, tokenizer(lines).input_ids):
        expected, found = dictionary.encode(cut(" ".join(line.split()))).tolist(), [means[index] for index in row]
        same = sorted(found) == sorted(expected)
        ties, failures = ties + (found != expected and same), failures + (not same)
    return ties, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="raw text, a sentence a line")
    parser.add_argument("--pieces", type=int, default=2000, help="of a model (default: 2000)")
    args = parser.parse_args()
    learned, real = words_of_scripts(4000, 5), []
    for path in args.text:
        with open(path, encoding="utf-8") as stream:
            learned += itertools.islice(stream, LEARNED)
            real += itertools.islice(stream, COMPARED)
    learned, real = ([line.strip() for line in lines] for lines in (learned, real))
    decomposed = [unicodedata.normalize("NFD", line) for line in [*real[:750], *words_of_scripts(750, 3)]]
    texts = {"real": real, "scripts": words_of_scripts(4000, 7), "random": random_characters(3000), "NFD": decomposed}
    rows = [["algorithm", "normalisation", *(f"{name} ({len(lines):,})" for name, lines in texts.items())]]
    for algorithm, (rule, fallback) in itertools.product(("unigram", "bpe"), RULES):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "spm")
            parts = learn(path, learned, algorithm, rule, fallback, args.pieces)
            cells = ["{} ties, {} failures".format(*compare(*parts, lines)) for lines in texts.values()]
        rows.append([algorithm, rule + ", byte fallback" * fallback, *cells])
    print(format_table(rows))


if __name__ == "__main__":
    main()
