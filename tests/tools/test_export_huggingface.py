"""``fairseq-deep export --format huggingface`` and ``import``: transformers computes and writes what the model does."""

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

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
SHARED = {"share_all_embeddings": True}
NORMED = {"layernorm_embedding": True}
STRUCTURES = {
    "one dictionary": ("prenorm_6l", SHARED, "M2M100"),
    "one dictionary, three tables": ("prenorm_6l", {"activation_fn": "gelu", "one": True}, "M2M100"),
    "a larger target": ("prenorm_6l", {"no_scale_embedding": True}, "M2M100"),
    "a smaller target": ("prenorm_6l", {"share_decoder_input_output_embed": True, "swap": True}, "Blenderbot"),
    "learned positions": ("prenorm_6l", {**LEARNED, **SHARED, "activation_fn": "gelu_accurate"}, "Blenderbot"),
    "one side learned": ("prenorm_6l", {"decoder_learned_pos": True, "max_target_positions": 20}, "Blenderbot"),
    "no positions": ("prenorm_6l", {"no_token_positional_embeddings": True}, "Blenderbot"),
    "a narrow output": ("prenorm_6l", {"decoder_output_dim": 8}, "M2M100"),
    "post-norm": ("postnorm_6l", {}, "FSMT"),
    "a norm of the embeddings": ("prenorm_6l", {**NORMED, **SHARED}, "MBart"),
    "post-norm, embeddings normed": ("lipschitz_postnorm_6l", {**NORMED, **LEARNED}, "Bart"),
    "pruned layers": ("prenorm_6l", {"encoder_layers": 3, "encoder_layers_to_keep": "0,2", **SHARED}, "M2M100"),
    "LayerScale": ("layerscale_18l18l", SHARED, "M2M100"),
    "DeepNet, embeddings normed": ("deepnet_18l18l", {**NORMED, **SHARED}, "Bart"),
    "Admin": ("admin_18l18l", {**NORMED, **LEARNED}, "Bart"),
}


@pytest.fixture
def export(command):
    """export(MODEL, ...): the same of the export; raw text has words without a tokeniser."""
    more = ["--format", "huggingface", "--tokenizer", "none"]
    return lambda *words: command("export", *words, *more)


def load(folder):
    from transformers import AutoModelForSeq2SeqLM

    with quiet():
        return AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()


def translations(path, lines, **parts):
    """The first words of greedy ones: at the limit, transformers does not end a sentence as we do."""
    translator = Translator(find_bundle(str(path), **parts), cpu=True, beam=1, max_len_a=0, max_len_b=12)
    return [line.split()[:8] for line in translator.translate(lines)]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_computes_the_same_in_both_directions(structure, make, export, command):
    """Log-probabilities, which both commands compare; greedy translations; and a checkpoint made of the export."""
    name, flags, kind = STRUCTURES[structure]
    _, folder = make(name, **flags)
    code, out, err = export(folder / "model.pt", "--output", folder / "out")
    assert (code, err) == (0, "") and f"{folder}/out: {kind}ForConditionalGeneration; log-probabilities of 16" in out
    assert not (folder / "out/target").exists() or "share_all_embeddings" not in flags
    lines = [" ".join(f"w{(5 * number + word) % 25}" for word in range(1 + number % 9)) for number in range(24)]
    expected = translations(folder / "model.pt", lines, tokenizer="none")
    assert translations(folder / "out", lines) == expected
    (folder / "back").mkdir()
    words = ["--from", "huggingface", "--output", folder / "back/model.pt", "--tokenizer", "none"]
    assert command("import", folder / "out", *words)[::2] == (0, "")
    again = load_model(find_bundle(str(folder / "back/model.pt")))
    assert [side.symbols for side in (again.source, again.target)] == [
        Dictionary.load(str(folder / f"dict.{side}.txt")).symbols for side in ("src", "tgt")
    ]
    assert translations(folder / "back/model.pt", lines) == expected
    assert again.stored.flags.share_all_embeddings == ("share_all_embeddings" in flags)


@pytest.fixture(scope="module")
def recipe(plain, tmp_path_factory):
    """A recipe's folder, its export, and what the command printed."""
    output = tmp_path_factory.mktemp("export") / "out"
    words = ["--output", output, "--licence", "CC-BY-4.0", "--name", "Of <numbers>", "--verify-sentences", "30"]
    return plain, output, run("fairseq-deep", "export", plain, "--format", "huggingface", *words)


def code_of(folder):
    """The Python code of the model's card."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    return code.replace("FOLDER", str(folder))


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
        exec(code_of(output), names)
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


def test_the_card_of_a_model_of_fairseq_names_its_architecture(make, export):
    """And its own number of parameters: FSMT stores positions, and three tables for one."""
    model, folder = make("postnorm_6l", **SHARED)
    own = f"{sum(parameter.numel() for parameter in model.parameters()):,}"
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer_iwslt_de_en"
    torch.save(state, folder / "stock.pt")
    for name, architecture in (("model", "`transformer_postnorm_6l` of fairseq_deep"),
                               ("stock", "`transformer_iwslt_de_en` of fairseq")):  # fmt: skip
        assert export(folder / f"{name}.pt", "--output", folder / name)[0] == 0
        card = (folder / name / "README.md").read_text()
        assert f"| architecture | {architecture} |" in card
        stored = sum(parameter.numel() for parameter in load(folder / name).parameters())
        assert f"| parameters | {own} ({stored:,} as stored by the class) |" in card


def test_the_files_of_fsmt_are_read(make, export, command):
    _, folder = make("postnorm_6l")
    assert export(folder / "model.pt", "--output", folder / "out")[0] == 0
    place = folder / "out"
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
