"""``fairseq-deep export --format ctranslate2``: CTranslate2 computes and writes what the model does."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.runtime import Translator, find_bundle
from tests.helpers.docs import code_of

ctranslate2 = pytest.importorskip("ctranslate2") if importlib.util.find_spec("ctranslate2") else None
pytestmark = pytest.mark.skipif(ctranslate2 is None, reason="needs ctranslate2")

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
    "Peri-LN below": ("prenorm_6l", {"encoder_residual": "peri", "activation_fn": "gelu"}),
    "Peri-LN above": ("prenorm_6l", {"decoder_residual": "peri", "encoder_residual": "layerscale", **RELATIVE}),
}  # fmt: skip


@pytest.fixture
def export(command):
    """export(MODEL, ...): exit code, output and errors."""
    return lambda *words: command("export", *words, "--format", "ctranslate2")


@pytest.fixture
def lines():
    """lines(DICTIONARY): sentences of 1 to 20 units, which are shorter and longer than relative positions reach."""
    draws = random.Random(3)
    return lambda dictionary: [" ".join(draws.choices(dictionary.symbols[4:], k=1 + number % 20))
                               for number in range(32)]  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_computes_and_writes_the_same(structure, make, export, lines):
    """Log-probabilities, which the command compares, and greedy translations."""
    name, flags = STRUCTURES[structure]
    model, folder = make(name, **flags)
    code, out, err = export(folder / "model.pt", "--output", folder / "out")
    assert (code, err) == (0, "") and "float32; log-probabilities of 16 sentences within " in out
    texts, search = lines(model.encoder.dictionary), {"cpu": True, "beam": 1, "max_len_a": 0, "max_len_b": 20}
    expected, found = (Translator(find_bundle(str(folder / path), tokenizer=tokenizer), **search).translate(texts)
                       for path, tokenizer in (("model.pt", "none"), ("out", None)))  # fmt: skip
    assert found == expected and len({*found}) > 1


def test_a_packaged_model_is_exported_in_both_formats(make, export):
    _, folder = make("prenorm_6l")
    package = str(folder / "package")
    assert cli.main(["package", str(folder / "model.pt"), "--tokenizer", "none", "--output", package]) == 0
    assert cli.main(["export", package, "--output", str(folder / "stock.pt")]) == 0
    for name in ("model.pt", "package", "stock.pt"):
        assert export(folder / name, "--output", folder / f"from_{name}")[0] == 0
    merges = ["w 1", "w 2", "w 3", *(f"w {digit}</w>" for digit in range(10))]
    merges += [f"w{first} {last}</w>" for first in "123" for last in range(10)]
    (folder / "merges").write_text("\n".join(["#version: 0.2", *merges, ""]))
    parts = "--data", folder, "--bpe-codes", folder / "merges", "--tokenizer", "none"
    assert export(folder / "model.pt", *parts, "--output", folder / "from_parts")[0] == 0
    assert (folder / "from_parts/code").read_text() == (folder / "merges").read_text()
    assert not (folder / "from_package/code").exists()
    files = {(folder / f"from_{name}/model.bin").read_bytes() for name in ("model.pt", "package", "stock.pt", "parts")}
    assert len(files) == 1


def scores(translator, units):
    return torch.tensor([score for result in translator.score_batch(*units) for score in result.log_probs])


def scores_with_avx2(output, units):
    """Log-probabilities by a process that sees a processor with AVX2 only, whatever this one has."""
    code = "import ctranslate2, json, sys; model = ctranslate2.Translator(sys.argv[1]);"
    code += "print(json.dumps([x for r in model.score_batch(*json.load(sys.stdin)) for x in r.log_probs]))"
    kind = {"CT2_FORCE_CPU_ISA": "AVX2", "CT2_USE_MKL": "0", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code, output], input=json.dumps(units), env={**os.environ, **kind},
                          capture_output=True, text=True, check=True)  # fmt: skip
    return torch.tensor(json.loads(done.stdout))


def test_quantised_weights_are_smaller_and_near(make, export, lines):
    """On each kind of processor: with 127 steps of a weight the error is 0.03 with VNNI, and 0.70 with AVX2 only."""
    model, folder = make("prenorm_6l", swap=True)
    units = [[line.split() for line in lines(side.dictionary)] for side in (model.encoder, model.decoder)]
    sizes, expected = {}, None
    for quantization in ("float32", "float16", "int8"):
        output = folder / quantization
        code, out, err = export(folder / "model.pt", "--output", output, "--quantization", quantization)
        assert (code, err) == (0, "")
        assert out.startswith(f"{folder}/model.pt -> {output}: for CTranslate2, {quantization}; log-probabilities of ")
        sizes[quantization] = (output / "model.bin").stat().st_size
        translator = ctranslate2.Translator(str(output))
        found = scores(translator, units)
        expected = found if expected is None else expected
        assert (found - expected).abs().max() < (0.1 if quantization == "int8" else 0.01), quantization
    assert (scores_with_avx2(output, units) - found).abs().max() < 1e-3, "sums overflow"
    assert sizes["int8"] < sizes["float16"] < sizes["float32"]


def test_another_length_penalty_than_gnmts_is_told(plain, tmp_path, command):
    exp = shutil.copytree(plain, tmp_path / "exp")
    record = json.loads((exp / "RESULT.json").read_text())
    (exp / "RESULT.json").write_text(json.dumps({**record, "gnmt_lenpen": True}))
    code, out, err = command("export", exp, "--format", "ctranslate2", "--output", tmp_path / "out")
    assert (code, err) == (0, "") and " with length^lenpen, since it has no GNMT length penalty, float32; " in out


def test_the_code_in_the_documentation_translates_as_translate_does(plain, tmp_path, monkeypatch, command, capsys):
    assert command("export", plain, "--format", "ctranslate2", "--output", tmp_path / "model.ct2")[0] == 0
    source = plain / "text/raw/test.en"
    limits = ["--beam", "4", "--lenpen", "0.6", "--max-len-a", "0", "--max-len-b", "250", "--cpu"]
    want, again = (command("translate", model, "--input", source, *limits)[1].splitlines()
                   for model in (plain, tmp_path / "model.ct2"))  # fmt: skip
    code = code_of("docs/tools/export-ctranslate2.md")
    assert "The old house is beautiful." in code
    monkeypatch.chdir(tmp_path)
    found = []
    for line in source.read_text().splitlines():
        exec(code.replace("The old house is beautiful.", line), {})
        found += capsys.readouterr().out.splitlines()
    assert found == again and sum(map(str.__eq__, found, want)) >= 39 and len({*found}) > 15
