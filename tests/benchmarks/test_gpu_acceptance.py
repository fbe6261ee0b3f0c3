"""``benchmarks/gpu_acceptance.py``: a trial on a CPU, its commands, and steps that fail."""

import argparse
import sys

import pytest
from fairseq import options as fairseq_options

from fairseq_deep.core import encoder
from fairseq_deep.core.attention import masks
from fairseq_deep.recipes.compare import driver
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import decoding  # noqa: E402
import gpu_acceptance  # noqa: E402
import gpu_check  # noqa: E402
import training  # noqa: E402


def test_a_trial_writes_each_step_and_names_those_that_fail(tmp_path, capfd, monkeypatch):
    words = "--minutes 60 --device cpu --small --out".split()
    words += [str(tmp_path), "--only", "environment", "correctness"]
    assert gpu_acceptance.main(words) == 0
    results = (tmp_path / "RESULTS.txt").read_text()
    assert results.startswith("commit ") and "Training works here." in results and "all checks passed" in results
    assert "fp64: output, all gradients" in (tmp_path / "02-correctness.txt").read_text()
    monkeypatch.setattr(gpu_acceptance, "steps", lambda options: {"environment": [sys.executable, "-c", "exit(3)"]})
    assert gpu_acceptance.main([*words[:-1]]) == 1
    assert "1 steps, 1 failed: environment; results: " in capfd.readouterr().out
    deaf = "import signal, time; signal.signal(15, print); print('begun', flush=True); time.sleep(600)"
    sleeps = [sys.executable, "-c", deaf]
    monkeypatch.setattr(gpu_acceptance, "GRACE", 1)
    monkeypatch.setattr(gpu_acceptance, "steps", lambda options: {"environment": sleeps, "correctness": ["true"]})
    assert gpu_acceptance.main([*words, "--minutes", "0.2"]) == 1
    assert "2 steps, 1 failed: environment; results: " in capfd.readouterr().out
    assert "begun" in (tmp_path / "RESULTS.txt").read_text()


@pytest.mark.parametrize("words", [["--precision", "bf16"], ["--small", "--device", "cpu"]], ids=["whole", "small"])
def test_the_commands_are_valid(words, tmp_path, capfd):
    options = gpu_acceptance.parse([*words, "--out", str(tmp_path)])
    commands = gpu_acceptance.steps(options)
    assert list(commands) == list(gpu_acceptance.STEPS)
    for name, benchmark in (("steps", training), ("decoding", decoding)):
        _, script, *flags = map(str, commands[name])
        parsed = benchmark.read_arguments(flags)
        assert script == benchmark.__file__ and parsed.device == options.device
        for system in parsed.systems if benchmark is training else ():
            line = training.command_line(system, parsed)
            assert fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), line).arch
    script, *flags = map(str, commands["trainings"])
    assert script == str(ROOT / "examples/compare/run.sh")
    driver.main("compare", script, ["--dry-run", *flags])
    assert capfd.readouterr().out.count("fairseq-train ") == (2 if options.small else 4)


def test_an_error_in_a_check_does_not_stop_the_others(monkeypatch, capsys):
    def failing(*others):
        yield "this", 0.0, 1.0
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(gpu_check, "checks", failing)
    models = ["plain pre-norm", "plain post-norm"]
    monkeypatch.setattr(sys, "argv", [*"x --device cpu --layers 1 --width 16 --compile --only".split(), *models])
    assert gpu_check.main() == 1
    assert capsys.readouterr().out.count("WRONG: RuntimeError: CUDA error: out of memory\n") == 2


@pytest.mark.parametrize("label", ["plain post-norm", "layer_agg-dlcl", "layer_agg-lstm", "decoder_attn-merged"])
def test_the_check_ignores_padding_which_is_masked_on_a_cpu_only(label, monkeypatch):
    dictionary, options = gpu_check.make_dictionary(50), argparse.Namespace(layers=2, width=16)
    model = gpu_check.build(*gpu_check.MODELS[label], dictionary, options)
    batch = gpu_check.make_batch(dictionary)
    expected = gpu_check.step(model, batch)
    for module in (encoder, masks):
        monkeypatch.setattr(module, "is_sync_free", lambda x: False)
    assert gpu_check.distance(gpu_check.step(model, batch), expected) < 1e-9
