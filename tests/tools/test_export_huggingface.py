"""``fairseq-deep export --format huggingface`` and ``import``: a recipe's model, its card, and files of FSMT."""

import importlib.util
import json
import re
from operator import eq

import pytest
import torch

from fairseq_deep.runtime import Translator, find_bundle, load_model
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.engines.transformers_engine import quiet
from tests.helpers.commands import losses, run, train_command
from tests.helpers.docs import code_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module")
def recipe(plain, tmp_path_factory):
    """A recipe's folder, its export, and what the command printed."""
    output = tmp_path_factory.mktemp("export") / "out"
    words = ["--output", output, "--licence", "CC-BY-4.0", "--name", "Of <numbers>", "--verify-sentences", "30"]
    return plain, output, run("fairseq-deep", "export", plain, "--format", "huggingface", *words)


def test_a_recipe_is_checked_with_its_test_set_and_its_card_translates(recipe):
    trained, output, done = recipe
    equal = r"within \d\.\de-0[67], (29|30) of 30 translations equal \(test.en, beam 3, lenpen 0.8\)"
    assert re.search(equal, done.stdout)
    card = (output / "README.md").read_text()
    assert card.startswith('---\nlanguage: ["en", "de"]\nlibrary_name: transformers\n')
    assert 'license: "cc-by-4.0"' in card
    assert "# Of &lt;numbers&gt;\n" in card and "translations equal" in card and "SHA256SUMS" not in card
    lines = [*(trained / "text/raw/test.en").read_text().splitlines(), ""]
    names = {}
    with quiet():
        exec(code_of(output / "README.md").replace("FOLDER", str(output)), names)
        found = names["translate"](lines)
    expected = Translator(str(trained), cpu=True).translate(lines)
    assert len(lines) == 41 and sum(map(eq, found, expected)) >= 40 and found[-1] == ""
    assert len({*found}) > 5
    assert oct((output / "model.safetensors").stat().st_mode) == oct((output / "config.json").stat().st_mode)


def test_an_imported_model_translates_and_trains_on(recipe, tmp_path, command):
    trained, output, _ = recipe
    path = tmp_path / "model.pt"
    code, out, err = command("import", output, "--from", "huggingface", "--output", path)
    assert (code, err) == (0, "") and "log-probabilities within" in out
    lines = (trained / "text/raw/test.en").read_text().splitlines()[:12]
    search = {"beam": 3, "lenpen": 0.8}
    found, expected = Translator(str(path), cpu=True, **search), Translator(str(trained), cpu=True)
    assert found.translate(lines) == expected.translate(lines)
    flags = ["--source-lang", "en", "--target-lang", "de", "--dropout", "0", "--decoder-embed-dim", "16"]
    flags += ["--encoder-normalize-before", "--decoder-normalize-before", "--max-source-positions", "24", "--no-save"]
    flags += ["--decoder-ffn-embed-dim", "32", "--encoder-layers", "2", "--decoder-layers", "2", "--max-update", "3"]
    resets = [f"--reset-{name}" for name in ("optimizer", "lr-scheduler", "dataloader", "meters")]
    for more in (["--restore-file", path, *resets], ["--init-from", path, "--encoder-layers", "4"]):
        done = run(*train_command(trained / "data-bin", tmp_path / "more", *flags, *more, arch="deep_transformer"))
        assert len(losses(done)) == 3 and losses(done)[1] < 3.5  # an untrained model has 5 and more


def test_the_card_of_a_model_of_fairseq_names_its_architecture(make, command):
    """And its own number of parameters: FSMT stores positions, and three tables for one."""
    model, folder = make("postnorm_6l", share_all_embeddings=True)
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer_iwslt_de_en"
    torch.save(state, folder / "stock.pt")
    words = ["--format", "huggingface", "--tokenizer", "none", "--output", folder / "out"]
    assert command("export", folder / "stock.pt", *words)[0] == 0
    card, own = (folder / "out/README.md").read_text(), sum(each.numel() for each in model.parameters())
    assert "| architecture | `transformer_iwslt_de_en` of fairseq |" in card
    assert re.search(rf"\| parameters \| {own:,} \([\d,]+ as stored by the class\) \|", card)


def test_the_files_of_fsmt_are_read(make, command):
    _, folder = make("postnorm_6l")
    place = folder / "out"
    words = ["--format", "huggingface", "--tokenizer", "none", "--output", place]
    assert command("export", folder / "model.pt", *words)[0] == 0
    for side, name in (("src", "tokenizer.json"), ("tgt", "target/tokenizer.json")):
        vocabulary = json.loads((place / name).read_text())["model"]["vocab"]
        pieces = {word if index < 4 else f"{word}</w>": index for word, index in vocabulary.items()}
        (place / f"vocab-{side}.json").write_text(json.dumps(pieces))
        (place / name).unlink()
    (place / "merges.txt").write_text("a b</w> 12\n")
    (folder / "back").mkdir()
    assert command("import", place, "--from", "huggingface", "--output", folder / "back/model.pt")[0] == 0
    assert (folder / "back/code").read_text() == "#version: 0.2\na b</w>\n"
    again = load_model(find_bundle(str(folder / "back/model.pt")))
    assert again.source.symbols == Dictionary.load(str(folder / "dict.src.txt")).symbols
