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

from tests.helpers.docs import code_of

ctranslate2 = pytest.importorskip("ctranslate2") if importlib.util.find_spec("ctranslate2") else None
pytestmark = pytest.mark.skipif(ctranslate2 is None, reason="needs ctranslate2")


@pytest.fixture
def export(command):
    """export(MODEL, ...): exit code, output and errors."""
    return lambda *words: command("export", *words, "--format", "ctranslate2")


def test_a_package_and_a_model_of_fairseq_give_the_same_file(make, command, export):
    _, folder = make("prenorm_6l")
    model = folder / "model.pt"
    assert command("package", model, "--tokenizer", "none", "--output", folder / "package")[0] == 0
    assert command("export", model, "--output", folder / "stock.pt")[0] == 0
    for name in ("model.pt", "package", "stock.pt"):
        assert export(folder / name, "--output", folder / f"from_{name}")[0] == 0
    assert len({path.read_bytes() for path in folder.glob("from_*/model.bin")}) == 1


def scores_with_avx2(output, units):
    """Log-probabilities by a process that sees a processor with AVX2 only, whatever this one has."""
    code = "import ctranslate2, json, sys; model = ctranslate2.Translator(sys.argv[1]);"
    code += "print(json.dumps([x for r in model.score_batch(*json.load(sys.stdin)) for x in r.log_probs]))"
    kind = {"CT2_FORCE_CPU_ISA": "AVX2", "CT2_USE_MKL": "0", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code, output], input=json.dumps(units), env={**os.environ, **kind},
                          capture_output=True, text=True, check=True)  # fmt: skip
    return torch.tensor(json.loads(done.stdout))


def test_quantised_weights_are_smaller_and_near(make, export):
    """On each kind of processor: with 127 steps of a weight the error is 0.03 with VNNI, and 0.70 with AVX2 only."""
    _, folder = make("prenorm_6l", swap=True)
    draws = random.Random(3)
    units = [[draws.choices([f"w{index}" for index in range(26)], k=1 + number % 20) for number in range(32)]] * 2
    sizes, found = [], []
    for quantization in ("float32", "float16", "int8"):
        output = folder / quantization
        code, out, err = export(folder / "model.pt", "--output", output, "--quantization", quantization)
        assert (code, err) == (0, "")
        assert out.startswith(f"{folder}/model.pt -> {output}: for CTranslate2, {quantization}; log-probabilities of ")
        sizes.append((output / "model.bin").stat().st_size)
        results = ctranslate2.Translator(str(output)).score_batch(*units)
        found.append(torch.tensor([score for result in results for score in result.log_probs]))
        assert (found[-1] - found[0]).abs().max() < (0.1 if quantization == "int8" else 0.01), quantization
    assert (scores_with_avx2(output, units) - found[-1]).abs().max() < 1e-3, "sums overflow"
    assert sizes == sorted({*sizes}, reverse=True)


def test_the_code_in_the_documentation_translates_as_translate_does(plain, tmp_path, monkeypatch, command, capsys):
    """Also if the recipe used GNMT's length penalty, which CTranslate2 lacks."""
    exp = shutil.copytree(plain, tmp_path / "exp")
    (exp / "RESULT.json").write_text('{"beam": 3, "lenpen": 0.8, "gnmt_lenpen": true}')
    code, out, err = command("export", exp, "--format", "ctranslate2", "--output", tmp_path / "model.ct2")
    assert (code, err) == (0, "") and " with length^lenpen, since it has no GNMT length penalty, float32; " in out
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
