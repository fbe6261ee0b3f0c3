"""The ways to ONNX in docs/tools/export-onnx.md, if the packages are installed: onnxruntime agrees with the model."""

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from fairseq_deep import cli
from fairseq_deep.runtime import Translator, find_bundle
from tests.helpers.exports import write_model
from tests.helpers.models import make_dictionary
from tests.helpers.onnx import PACKAGES, documented, missing, session
from tests.helpers.paths import ROOT

ONE = {"encoder_layers": 1, "decoder_layers": 1}
LINES = [f"w{3 * i} w{30 - i}" for i in range(8)]
CONVERTER = shutil.which("optimum-cli")  # of an environment of its own


@pytest.mark.skipif(missing(*PACKAGES), reason="needs onnx, onnxscript and onnxruntime")
@pytest.mark.parametrize("name, beam", [("dlcl_6l", 1), ("ds_matt_12l12l", 3)])
def test_programs_in_onnx_translate_as_the_model(name, beam, tmp_path, monkeypatch):
    write_model(tmp_path, name, (make_dictionary(38), make_dictionary(30)), **ONE)
    monkeypatch.chdir(tmp_path)
    words = ["--format", "torch", "--tokenizer", "none", "--beam", str(beam), "--capacity", "16"]
    assert cli.main(["export", "model.pt", "--output", "model.pt2", *words]) == 0
    exec(documented(), {})
    model = runpy.run_path(str(ROOT / "examples/translate_pt2.py"))["Model"]("model.pt2")
    programs = model.settings["programs"]
    model.encoder, model.step = (session(f"{each}.onnx", programs[each]) for each in ("encoder", "step"))
    search = {"beam": beam, "max_len_a": 0, "max_len_b": 15}
    expected = Translator(find_bundle("model.pt", tokenizer="none"), cpu=True, **search).translate(LINES)
    assert model.translate(LINES) == expected and len({*expected}) > 1


GENERATE = """import json, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from optimum.onnxruntime import ORTModelForSeq2SeqLM
batch = AutoTokenizer.from_pretrained("model.hf")(sys.stdin.read().splitlines(), return_tensors="pt", padding=True)
models = AutoModelForSeq2SeqLM.from_pretrained("model.hf"), ORTModelForSeq2SeqLM.from_pretrained("model.onnx")
print(json.dumps([model.generate(**batch, max_new_tokens=12).tolist() for model in models]))"""


@pytest.mark.skipif(CONVERTER is None or bool(missing("transformers")), reason="needs optimum-cli and transformers")
def test_an_export_for_transformers_becomes_onnx(tmp_path):
    dictionary = make_dictionary(38)
    write_model(tmp_path, "prenorm_6l", (dictionary, dictionary), share_all_embeddings=True, **ONE)
    words = ["--format", "huggingface", "--tokenizer", "none", "--output", str(tmp_path / "model.hf")]
    assert cli.main(["export", str(tmp_path / "model.pt"), *words]) == 0
    command = ["export", "onnx", "--model", "model.hf", "--task", "text2text-generation-with-past", "model.onnx"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which is of this environment
    place = {"cwd": tmp_path, "env": env, "check": True, "capture_output": True, "text": True, "timeout": 300}
    subprocess.run([CONVERTER, *command], **place)
    program = [Path(CONVERTER).parent / "python", "-c", GENERATE]
    done = subprocess.run(program, input="\n".join(LINES), **place)
    expected, found = json.loads(done.stdout.splitlines()[-1])
    assert found == expected and len({*map(tuple, found)}) > 2
