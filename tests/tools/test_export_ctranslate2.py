"""``fairseq-deep export --format ctranslate2``: CTranslate2 computes and writes what the model does."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep import cli
from tests.helpers.commands import run, train_command
from tests.helpers.docs import code_of
from tests.helpers.exports import write_model
from tests.helpers.models import make_dictionary

ctranslate2 = pytest.importorskip("ctranslate2") if importlib.util.find_spec("ctranslate2") else None
pytestmark = pytest.mark.skipif(ctranslate2 is None, reason="needs ctranslate2")

PAD, EOS = 1, 2
RELATIVE = {"relative_positions": 3, "no_token_positional_embeddings": True}
MODERN = {"norm": "rms", "ffn": "swiglu", "rotary_positions": True}
STRUCTURES = {
    "pre-norm": ("prenorm_6l", {}),
    "post-norm": ("postnorm_6l", {"layernorm_embedding": True, "activation_fn": "gelu"}),
    "one table": ("lipschitz_postnorm_6l", {"share_all_embeddings": True, "activation_fn": "gelu_accurate"}),
    "tied output": ("prenorm_6l", {"share_decoder_input_output_embed": True, "no_scale_embedding": True}),
    "learned positions": ("ds_6l", {"encoder_learned_pos": True, "decoder_learned_pos": True}),
    "no positions": ("prenorm_6l", {"no_token_positional_embeddings": True, "no_decoder_final_norm": True}),
    "sides differ": ("prenorm_6l", {"encoder_embed_dim": 32, "decoder_attention_heads": 4,
                                    "decoder_normalize_before": False}),
    "relative keys": ("postnorm_6l", {**RELATIVE, "activation_fn": "tanh"}),
    "swish": ("prenorm_6l", {"activation_fn": "swish", "encoder_layers": 1}),
    "relative values": ("relative_6l", RELATIVE),
    "DeepNet": ("deepnet_18l18l", {"share_all_embeddings": True}),
    "Admin": ("admin_18l18l", {"decoder_layers": 2}),
    "LayerScale": ("layerscale_18l18l", {"layerscale_start": 0.5}),
    "Peri-LN": ("peri_18l18l", {}),
    "modern": ("modern_6l", {"decoder_kv_heads": 1, "encoder_layers": 2}),
    "modern post-norm": ("postnorm_6l", {**MODERN, "ffn": "geglu", "layernorm_embedding": True}),
    "modern Peri-LN": ("peri_18l18l", MODERN),
    "Peri-LN below": ("prenorm_6l", {"encoder_residual": "peri", "activation_fn": "gelu"}),
    "Peri-LN above": ("prenorm_6l", {"decoder_residual": "peri", "encoder_residual": "layerscale", **RELATIVE}),
}  # fmt: skip


@pytest.fixture(scope="module")
def dictionaries(tmp_path_factory):
    """A folder with a dictionary of 38 source units, and one of 30 target units."""
    folder = tmp_path_factory.mktemp("dictionaries")
    for language, size in (("src", 38), ("tgt", 30)):
        make_dictionary(size, language).save(str(folder / f"dict.{language}.txt"))
    return folder


@pytest.fixture
def make(tmp_path, dictionaries):
    """make(name, **flags): the model of an architecture, with random norms and biases, and a folder with its parts."""

    def make(name, **flags):
        languages = ["src", "src" if flags.get("share_all_embeddings") else "tgt"]
        both = [Dictionary.load(str(dictionaries / f"dict.{language}.txt")) for language in languages]
        return write_model(tmp_path, name, both, **flags), tmp_path

    return make


@pytest.fixture
def export(command):
    """export(MODEL, ...): exit code, output and errors."""
    return lambda *words: command("export", *words, "--format", "ctranslate2")


def words_of(dictionary, count, length):
    return torch.randint(dictionary.nspecial, len(dictionary), (count, length))


def log_probabilities(model, source, target):
    """Of each unit of *target* and its end (B x T+1), <pad> being impossible."""
    ends = torch.full((len(source), 1), EOS)
    source, inputs = torch.cat([source, ends], 1), torch.cat([ends, target], 1)
    lengths = torch.full((len(source),), source.size(1))
    with torch.no_grad():
        scores, _ = model(source, lengths, inputs)
    scores[..., PAD] = float("-inf")
    return torch.log_softmax(scores, -1).gather(2, torch.cat([target, ends], 1).unsqueeze(2)).squeeze(2)


def greedy(model, source, steps):
    """The likeliest units one after the other (B x steps); not <pad>, and at first not </s>."""
    ends = torch.full((len(source), 1), EOS)
    source, target = torch.cat([source, ends], 1), ends
    lengths = torch.full((len(source),), source.size(1))
    for step in range(steps):
        with torch.no_grad():
            scores = model(source, lengths, target)[0][:, -1]
        scores[:, PAD] = float("-inf")
        if step == 0:
            scores[:, EOS] = float("-inf")
        target = torch.cat([target, scores.argmax(1, keepdim=True)], 1)
    return target[:, 1:]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_computes_the_same(structure, make, export):
    """Log-probabilities of sentences shorter and longer than relative positions reach; and step by step."""
    name, flags = STRUCTURES[structure]
    model, folder = make(name, **flags)
    assert export(folder / "model.pt", "--output", folder / "out")[::2] == (0, "")
    translator = ctranslate2.Translator(str(folder / "out"), compute_type="float32")
    dictionaries = model.encoder.dictionary, model.decoder.dictionary

    def units(rows, dictionary):
        return [[dictionary[word] for word in row] for row in rows]

    for lengths in ((1, 2), (12, 20)):
        pair = [words_of(dictionary, 4, length) for dictionary, length in zip(dictionaries, lengths)]
        results = translator.score_batch(*map(units, pair, dictionaries))
        found = torch.tensor([result.log_probs for result in results])
        torch.testing.assert_close(found, log_probabilities(model, *pair), atol=2e-5, rtol=1e-5)
    source = words_of(dictionaries[0], 32, 9)
    found = translator.translate_batch(units(source, dictionaries[0]), beam_size=1, max_decoding_length=20)
    expected = [" ".join(row).partition(" </s>")[0] for row in units(greedy(model, source, 20), dictionaries[1])]
    assert [" ".join(result.hypotheses[0]) for result in found] == expected
    assert len({*expected}) > 1


def test_a_model_of_fairseq_itself(make, export):
    """Which its own converter refuses with a torch of today."""
    model, folder = make("postnorm_6l")
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer"
    torch.save(state, folder / "stock.pt")
    for name in ("model", "stock"):
        assert export(folder / f"{name}.pt", "--output", folder / name)[0] == 0
    assert (folder / "model/model.bin").read_bytes() == (folder / "stock/model.bin").read_bytes()


def test_a_packaged_model_is_exported_in_both_formats(make, export):
    _, folder = make("prenorm_6l")
    package = str(folder / "package")
    assert cli.main(["package", str(folder / "model.pt"), "--tokenizer", "none", "--output", package]) == 0
    assert cli.main(["export", package, "--output", str(folder / "stock.pt")]) == 0
    for name in ("model.pt", "package", "stock.pt"):
        assert export(folder / name, "--output", folder / f"from_{name}")[0] == 0
    merges = ["s r", "sr c", *(f"src {digit}" for digit in "123"), *(f"src {digit}</w>" for digit in range(10))]
    merges += [f"src{first} {last}</w>" for first in "123" for last in range(10)]
    (folder / "merges").write_text("\n".join(["#version: 0.2", *merges, ""]))
    parts = "--data", folder, "--bpe-codes", folder / "merges", "--tokenizer", "none"
    assert export(folder / "model.pt", *parts, "--output", folder / "from_parts")[0] == 0
    assert (folder / "from_parts/code").read_text() == (folder / "merges").read_text()
    assert not (folder / "from_package/code").exists()
    files = {(folder / f"from_{name}/model.bin").read_bytes() for name in ("model.pt", "package", "stock.pt", "parts")}
    assert len(files) == 1


def scores_with_avx2(output, units):
    """Log-probabilities by a process that sees a processor with AVX2 only, whatever this one has."""
    code = "import ctranslate2, json, sys; model = ctranslate2.Translator(sys.argv[1]);"
    code += "print(json.dumps([r.log_probs for r in model.score_batch(*json.load(sys.stdin))]))"
    kind = {"CT2_FORCE_CPU_ISA": "AVX2", "CT2_USE_MKL": "0", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code, output], input=json.dumps(units), env={**os.environ, **kind},
                          capture_output=True, text=True, check=True)  # fmt: skip
    return torch.tensor(json.loads(done.stdout))


def test_quantised_weights_are_smaller_and_near(make, export):
    """On each kind of processor: with 127 steps of a weight the error is 0.03 with VNNI, and 0.70 with AVX2 only."""
    model, folder = make("prenorm_6l")
    pair = [words_of(side.dictionary, 4, 9) for side in (model.encoder, model.decoder)]
    units = [[[side.dictionary[word] for word in row] for row in rows]
             for side, rows in zip((model.encoder, model.decoder), pair)]  # fmt: skip
    expected = log_probabilities(model, *pair)
    sizes = {}
    for quantization in ("float32", "float16", "int8"):
        output = folder / quantization
        code, out, err = export(folder / "model.pt", "--output", output, "--quantization", quantization)
        assert (code, err) == (0, "")
        assert out.startswith(f"{folder}/model.pt -> {output}: for CTranslate2, {quantization}; log-probabilities of ")
        sizes[quantization] = (output / "model.bin").stat().st_size
        translator = ctranslate2.Translator(str(output))
        found = torch.tensor([result.log_probs for result in translator.score_batch(*units)])
        assert (found - expected).abs().max() < (0.1 if quantization == "int8" else 0.01), quantization
    assert (scores_with_avx2(output, units) - found).abs().max() < 1e-3, "sums overflow"
    assert sizes["int8"] < sizes["float16"] < sizes["float32"]


@pytest.fixture(scope="module")
def recipe(data, tmp_path_factory):
    """What a recipe leaves of a model with relative positions that has learned when to stop."""
    exp = tmp_path_factory.mktemp("recipe")
    flags = ["--relative-positions", "4", "--relative-values", "--no-token-positional-embeddings", "--lr", "1e-2"]
    limits = "-s src -t tgt --max-update 150 --no-epoch-checkpoints --disable-validation --log-interval 50".split()
    run(*train_command(data, exp / "checkpoints", *flags, *limits, arch="transformer_prenorm_2l2l_tiny"))
    (exp / "data-bin").symlink_to(data)
    (exp / "text/bpe").mkdir(parents=True)
    (exp / "text/bpe/code").write_text("#version: 0.2\na b</w>\n")
    (exp / "text/raw").mkdir()
    shutil.copy(data.parent / "test.src", exp / "text/raw/test.en")
    return exp


def test_the_code_in_the_documentation_translates_as_translate_does(recipe, tmp_path, monkeypatch, capsys):
    done = run("fairseq-deep", "export", recipe, "--format", "ctranslate2", "--output", tmp_path / "model.ct2")
    checkpoint = recipe / "checkpoints/checkpoint_last.pt"
    start = f"{checkpoint} -> {tmp_path}/model.ct2: for CTranslate2, float32; log-probabilities of 16 sentences within "
    assert done.stdout.startswith(start)
    source = recipe / "text/raw/test.en"
    limits = ["--beam", "4", "--lenpen", "0.6", "--max-len-a", "0", "--max-len-b", "250"]
    want, again = (run("fairseq-deep", "translate", model, "--input", source, *limits, "--cpu").stdout.splitlines()
                   for model in (recipe, tmp_path / "model.ct2"))  # fmt: skip
    code = code_of("docs/tools/export-ctranslate2.md")
    assert "The old house is beautiful." in code
    monkeypatch.chdir(tmp_path)
    found = []
    for line in source.read_text().splitlines():
        exec(code.replace("The old house is beautiful.", line), {})
        found += capsys.readouterr().out.splitlines()
    assert found == again == want and len({*found}) > 15
