"""Recipes of many languages and of several references from text to BLEU, with a few updates."""

import json
import random

import pytest
import torch

from fairseq_deep.recipes.summary import table_rows
from tests.helpers import recipes
from tests.helpers.commands import FEED_FORWARD, NARROW
from tests.helpers.paths import ROOT
from tests.helpers.recipes import lines, pack

MODEL = ["--max-update", "4", "--encoder-layers", "2", "--decoder-layers", "2", *NARROW[:-1], *FEED_FORWARD]
WORDS = {
    "en": "we see the old house and not a green tree".split(),
    "de": "wir sehen das alte Haus und keinen grünen Baum".split(),
    "fr": "nous voyons la vieille maison et pas un arbre".split(),
    "zh": ["我们", "看见", "老", "房子", "和", "绿色", "的", "树", "今天"],
}


def sentences(lang, count, seed):
    """As many lines of words that are the same ones, whatever the language."""
    rng, join = random.Random(seed), "" if lang == "zh" else " "
    return [join.join(WORDS[lang][rng.randrange(9)] for _ in range(rng.randint(3, 7))) for _ in range(count)]


def text(lang, seed, count=25):
    return "".join(f"{line}\n" for line in sentences(lang, count, seed))


def make_nist(home):
    for split, count in {"train": 60, "valid": 4, "test": 5, "test1": 4, "test2": 6}.items():
        for lang in ("zh", "en"):
            (home / f"{split}.{lang}").write_text(text(lang, split, count))
        for number in (1, 2, 3) if split.startswith("test") else ():
            (home / f"{split}.en.ref{number}").write_text(text("en", f"{split}{number}", count))


def make_opus(home):
    """Three pairs with English, of which the largest has 40 lines, and two without."""
    files = {}
    for other, count in {"de": 40, "fr": 20, "zh": 10}.items():
        pair = f"{other}-en" if other == "de" else f"en-{other}"
        for split, number in (("train", count), ("dev", 5), ("test", 3)):
            for lang in (other, "en"):
                name = f"opus-100-corpus/v1.0/supervised/{pair}/opus.{pair}-{split}.{lang}"
                files[name] = text(lang, split + other, number)
    for pair in ("de-fr", "fr-zh"):
        for lang in pair.split("-"):
            files[f"opus-100-corpus/v1.0/zero-shot/{pair}/opus.{pair}-test.{lang}"] = text(lang, pair, 2)
    pack(home / "opus-100-corpus-v1.0.tar.gz", files)


def run(task, home, exp, *words):
    """Run the recipe *task* from *home* into *exp*; return what it printed."""
    where = ["--data", home] if task == "nist_zhen" else ["--data-url", home.as_uri()]
    fixed = ["--force-batch", "--update-freq", "1", "--average-updates", "0", "--disk-gb", "0", "--ngpu", "0",
             "--workers", "1", "--bpe-merges", "60", "--exp", exp, *where]  # fmt: skip
    script = ROOT / "examples" / task / "run.sh"
    done = recipes.driven(script, *fixed, *words, "--", *MODEL)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def smoke(task, home, exp, *words):
    """Its RESULT.json after a short training, and what it printed."""
    said = run(task, home, exp, *words)
    record = json.loads((exp / "RESULT.json").read_text())
    assert record["updates"] == 4 and said.splitlines()[-1] == f"BLEU = {record['bleu']:.2f}"
    return record, said


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def exp(tmp_path):
    return tmp_path / "exp"


def test_many_pairs_in_one_model(programs, home, exp, tmp_path):
    make_opus(home)
    record, said = smoke("opus100", home, exp, "--temperature", "2", "--conf", "laln_lalt")
    raw, cut = exp / "text/raw", exp / "text/bpe"
    # 40, 40 sqrt(20 / 40) and 40 sqrt(10 / 40), both ways; two ways of the test sets
    assert record["pairs"] == {"train": 2 * (40 + 28 + 20), "valid": 30, "test": 6 * 3 + 4 * 2}
    trained = list(zip(lines(raw / "train.src"), lines(raw / "train.tgt")))
    german, english = sentences("de", 1, "trainde")[0], sentences("en", 1, "trainde")[0]
    assert trained[0] == (f"<2en> {german}", english) and trained[40] == (f"<2de> {english}", german)
    assert [line.split()[0] for line in lines(cut / "train.src")] == [pair[0].split()[0] for pair in trained]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *(line.split()[0] for line in lines(exp / "data-bin/dict.src.txt"))]
    weights = torch.load(exp / "averaged.pt", weights_only=False)["model"]
    tags = [symbols[index] for index in weights["encoder.language_index.tags"]]
    assert tags == [symbol for symbol in symbols if symbol.startswith("<2")] and len(tags) == 4
    assert len({tuple(row) for row in weights["encoder.language_transform.weight"].flatten(1).tolist()}) == 5
    scored = record["scores"]["test"]["sacrebleu"]
    directions = {name: found["pairs"] for name, found in scored["directions"].items()}
    assert directions == {"en-xx": 3, "xx-en": 3, "zero-shot": 4} and len(scored["pairs"]) == 10
    assert lines(exp / "pairs/test.fr-zh.ref") == sentences("zh", 2, "fr-zh")
    assert lines(exp / "pairs/test.en-de.ref") == sentences("de", 3, "testde")
    assert "zero-shot" in said
    assert 0 <= scored["directions"]["zero-shot"]["language_accuracy"] <= 100
    against = {"against": {"system": "other", "pairs": {}}}  # no measures of the whole set
    scores = {"test": {**record["scores"]["test"], "sacrebleu": {**scored, **against}}}
    rows = table_rows(exp, {**record, "scores": scores}, "xx")
    assert "sacreBLEU" in dict(rows) and "against" not in dict(rows)
    words = ["--temperature", "2", "--conf", "laln_lalt_robt", "--start-from", exp, "--subsets", "none"]
    said = run("opus100", home, tmp_path / "tuned", *words)
    tuned = json.loads((tmp_path / "tuned/RESULT.json").read_text())
    assert tuned["updates"] == 4 and (tmp_path / "tuned/text").resolve() == exp / "text"
    log = (tmp_path / "tuned/logs/4-train.log").read_text()
    assert f"loading pretrained model from {exp}/checkpoints/checkpoint_last.pt" in log
    assert log.count('"train_robt_loss"') >= 1 and said.count("already done") >= 3


def test_nist_zhen_from_text_to_bleu_with_four_references(programs, home, exp):
    make_nist(home)
    record, said = smoke("nist_zhen", home, exp, "--subsets", "test,test2")
    assert record["pairs"] == {"train": 60, "valid": 4, "test": 5, "test1": 4, "test2": 6}
    found = [record["scores"][name][kind] for name in ("test", "test2") for kind in ("sacrebleu", "tokenised")]
    assert all("nrefs:4|case:lc" in each["signature"] for each in found)
    for mean, kind in (("mean_bleu", "sacrebleu"), ("mean_tokenised_bleu", "tokenised")):
        each = [record["scores"][name][kind]["bleu"] for name in ("test", "test2")]
        assert record[mean] == pytest.approx(sum(each) / 2, abs=0.01)
    assert "mean of all test sets" in said and (exp / "text/bpe/code.en").exists()
    assert len({path.read_text() for path in (exp / "data-bin").glob("dict.*.txt")}) == 2, "a vocabulary for each side"
