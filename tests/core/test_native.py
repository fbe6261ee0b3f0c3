"""Compiled kernels against torch's operations: products, layers, the LSTM; how the library is built and kept."""

import copy
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core.aggregators.lstm_cell import norm_gates
from fairseq_deep.core.attention.beams import SharedBeamState
from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.decoding.int8 import Int8Linear
from fairseq_deep.core.layers import DecoderContext
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.functions import weighted_sum
from fairseq_deep.core.native.packed import NativeLinear, PacksWeight
from fairseq_deep.core.native.steps import NativeAttention, NativeLayer, NativeStack, begin_step
from fairseq_deep.core.transformer import Transformer
from tests.helpers.tensors import case

pytestmark = pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}")
REPO = Path(__file__).parents[2]
ROWS = (1, 5, 6, 7, 11, 12, 13, 25)
SHAPES = [(1, 1), (37, 5), (16, 16), (33, 100), (64, 24), (70, 7)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
@torch.no_grad()
def test_products_of_any_size(outputs, inputs, bias):
    for rows in ROWS:
        layer, x = case((1, rows, inputs, outputs), bias)
        given = x[0].clone()
        y = NativeLinear(layer.weight)(x[0], layer.bias)
        torch.testing.assert_close(y, layer(x[0]), rtol=1e-5, atol=1e-5)
        assert torch.equal(x[0], given)


@torch.no_grad()
def test_a_row_that_is_not_finite_spoils_no_other_and_stays_so():
    layer, x = case((1, 14, 40, 33))
    product = NativeLinear(layer.weight)
    alone = product(x[0], layer.bias)
    x[0, 3], x[0, 12, 5] = float("nan"), float("inf")
    y = product(x[0], layer.bias)
    finite = torch.tensor([row not in (3, 12) for row in range(14)])
    assert torch.equal(y[finite], alone[finite]) and not y[~finite].isfinite().any()


@torch.no_grad()
def test_sums_over_layers():
    entries, weights = [torch.randn(1, 7, 19) for _ in range(5)], torch.randn(5)
    expected = sum(weight * entry.double() for weight, entry in zip(weights, entries))
    torch.testing.assert_close(weighted_sum(weights, entries).double(), expected, rtol=1e-5, atol=1e-6)


FLAGS = {
    "pre": ("transformer_prenorm_6l", {}),
    "post": ("transformer_postnorm_6l", {}),
    "rms": ("transformer_prenorm_6l", {"norm": "rms"}),
    "kv heads": ("transformer_prenorm_6l", {"decoder_kv_heads": 2}),
    "swish": ("transformer_prenorm_6l", {"activation_fn": "swish"}),
    "rotary positions": ("transformer_prenorm_6l", {"rotary_positions": True, "decoder_kv_heads": 2}),
    "modern": ("transformer_modern_6l", {}),
    "factor": ("transformer_prenorm_6l", {"residual": "completep"}),
    "modern post-norm": ("transformer_postnorm_6l", {"ffn": "swiglu", "rotary_positions": True}),
    "no norms": ("transformer_postnorm_6l", {"deep_init": "tfixup"}),
    "language model": ("transformer_prenorm_6l", {"no_cross_attention": True}),
    "sums between layers": ("transformer_dlcl_6l", {}),
    "a memory per layer": ("transformer_prenorm_6l", {"decoder_memory": "transparent"}),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FLAGS)
@torch.no_grad()
def test_layers_are_those_of_torch(name, threads, build, monkeypatch):
    """With several hypotheses a sentence, padding in the source, new orders of hypotheses, and sentences that leave.

    A plain stack is one call per step, unless its layers have memories of their own.
    """
    arch, flags = FLAGS[name]
    torch.manual_seed(3)
    model = build(arch, encoder_layers=1, decoder_layers=2, **flags).eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    Transformer.prepare_for_decoding(model)
    kernels, calls = (NativeLayer, 2 * 9) if name.endswith(("layers", "per layer")) else (NativeStack, 9)
    ran, run = [], kernels.__call__
    monkeypatch.setattr(kernels, "__call__", lambda *args: ran.append(1) or run(*args))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = steps(model)
        assert len(ran) == calls
        monkeypatch.setattr(library, "enabled", False)
        expected = steps(model)
        assert len(ran) == calls
    finally:
        torch.set_num_threads(before)
    for step, (ours, theirs) in enumerate(zip(found, expected)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5, msg=lambda text, at=step: f"step {at}: {text}")


@torch.no_grad()
def test_rotated_attention_of_other_layers(build, monkeypatch):
    """The kernels have no GELU, so torch runs these layers around attentions in kernels."""
    model = build("transformer_prenorm_6l", decoder_layers=2, activation_fn="gelu", rotary_positions=True).eval()
    Transformer.prepare_for_decoding(model)
    ran, run = [], NativeAttention.__call__
    monkeypatch.setattr(NativeAttention, "__call__", lambda *args: ran.append(1) or run(*args))
    found = steps(model)
    assert len(ran) == 2 * 2 * 9
    monkeypatch.setattr(library, "enabled", False)
    for ours, theirs in zip(found, steps(model)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def steps(model):
    """The scores of nine steps of three hypotheses for each of three sentences."""
    draws = torch.Generator().manual_seed(1)
    source = torch.randint(4, 30, (3, 21), generator=draws)
    source[0, :4], source[2, :9] = 1, 1
    encoded = model.encoder(source, source.ne(1).sum(1))
    beams, scores, state = torch.arange(3).repeat_interleave(3), [], {}
    encoded = model.encoder.reorder_encoder_out(encoded, beams)
    tokens = torch.randint(4, 30, (9, 9), generator=draws)
    for step in range(9):
        scores.append(model.decoder(tokens[:, : step + 1], encoder_out=encoded, incremental_state=state)[0])
        sentences = torch.arange(len(tokens) // 3) if step != 4 else torch.tensor([0, 2])
        order = (sentences.unsqueeze(1) * 3 + torch.randint(3, (len(sentences), 3), generator=draws)).flatten()
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoded, tokens = model.encoder.reorder_encoder_out(encoded, order), tokens[order]
    return scores


@pytest.mark.parametrize("flags", [{}, {"lstm_merge": "concat"}, {"lstm_biases": True}], ids=str)
@torch.no_grad()
def test_a_step_of_the_lstm_is_that_of_torch(flags, build, monkeypatch):
    model = build("transformer_lstm_6l", decoder_layers=2, **flags).eval()
    lstm = model.decoder.aggregator
    for parameter in lstm.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    Transformer.prepare_for_decoding(model)
    dim, width = lstm.dim, lstm.gates[0].weight.size(1) - lstm.dim
    state, attention = [torch.randn(1, 13, dim) for _ in range(2)], torch.randn(1, 13, width)
    assert lstm._native(state[0], 0) is not None
    ours = lstm.write(state, 0, attention)
    monkeypatch.setattr(library, "enabled", False)
    for mine, theirs in zip(ours, lstm.write(state, 0, attention)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["weights", "bias", "gate norm", "norm", "train"])
@torch.no_grad()
def test_changes_of_an_lstm_are_seen(change, build, monkeypatch):
    model = build("transformer_lstm_6l", decoder_layers=2, lstm_biases=True).eval()
    Transformer.prepare_for_decoding(model)
    lstm = model.decoder.aggregator
    hidden, gates = lstm.hidden[1], lstm.gates[0]
    state, attention = [torch.randn(1, 5, lstm.dim) for _ in range(2)], torch.randn(1, 5, lstm.dim)
    first, others = lstm._native(state[0], 1), lstm._native(state[0], 0)
    assert first is not None and lstm._native(state[0], 1) is first is not others
    before = lstm.write(state, 1, attention)
    if change == "train":
        hidden.train()
        assert lstm._native(state[0], 1) is None
        hidden.eval()
    elif change == "weights":
        hidden.fc2.load_state_dict({name: 2 * value for name, value in hidden.fc2.state_dict().items()})
    elif change == "bias":
        gates.bias = torch.nn.Parameter(gates.bias + torch.randn_like(gates.bias))
    elif change == "norm":
        hidden.layer_norm.weight = torch.nn.Parameter(2 * hidden.layer_norm.weight)
    else:
        gates.norm_weight = torch.nn.Parameter(2 * gates.norm_weight)
    after = lstm.write(state, 1, attention)
    assert torch.equal(after[0], before[0]) == (change == "train")
    assert lstm._native(state[0], 1) not in (None, first)
    monkeypatch.setattr(library, "enabled", False)
    for ours, theirs in zip(after, lstm.write(state, 1, attention)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_layer_of_the_alignment_is_left_to_torch(build, monkeypatch):
    model = build("transformer_prenorm_6l", decoder_layers=2).eval()
    Transformer.prepare_for_decoding(model)
    expected, ran, run = steps(model), [], NativeLayer.__call__
    monkeypatch.setattr(NativeLayer, "__call__", lambda *args: ran.append(1) or run(*args))
    model.decoder.make_generation_fast_(need_attn=True)
    for ours, theirs in zip(steps(model), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert len(ran) == 9


def test_int8_is_for_both_stacks(build):
    model = build("transformer_lstm_6l", encoder_layers=2, decoder_layers=2).eval()
    Transformer.prepare_for_decoding(model)
    decoder, encoder, of_encoder = decode_in(model, "int8")
    assert decoder > 0 and encoder > 0 and of_encoder == "int8"
    for stack in (model.encoder, model.decoder):
        assert not [part for part in stack.modules() if isinstance(part, PacksWeight) and not part.in_int8]
        assert sum(isinstance(part, Int8Linear) for part in stack.modules()) > 5


@torch.no_grad()
def test_a_step_of_the_lstm_in_int8_is_that_of_its_parts(build, monkeypatch):
    """The gates, too, whose product is not a linear layer's."""
    model = build("transformer_lstm_6l", decoder_layers=2, lstm_biases=True).eval()
    Transformer.prepare_for_decoding(model)
    lstm, plain = model.decoder.aggregator, copy.deepcopy(model.decoder.aggregator)
    decode_in(model, "int8")
    dim, width = lstm.dim, lstm.gates[0].weight.size(1) - lstm.dim
    state, attention = [torch.randn(1, 13, dim) for _ in range(2)], torch.randn(1, 13, width)
    found, rough = lstm.write(state, 0, attention), plain.write(state, 0, attention)
    monkeypatch.setattr(lstm, "_native", lambda *_: None)
    c = torch.cat([state[0], attention], dim=2)
    gates = lstm.gates[0]
    weight = gates.weight
    whole = (weight / weight.abs().amax(1, True) * 127).round() * weight.abs().amax(1, True) / 127
    rounded = (c / c.abs().amax(2, True) * 127).round() * c.abs().amax(2, True) / 127
    expected = norm_gates(F.linear(rounded, whole, gates.bias), gates.norm_weight, gates.norm_bias)
    torch.testing.assert_close(gates.inputs(c), expected, rtol=1e-4, atol=1e-4)
    for ours, parts, fp32 in zip(found, lstm.write(state, 0, attention), rough):
        torch.testing.assert_close(ours, parts, rtol=1e-5, atol=1e-5)
        assert 1e-6 < float((ours - fp32).abs().max()) < 0.1


@pytest.mark.parametrize("name", ["transformer_prenorm_6l", "transformer_lstm_6l"])
@torch.no_grad()
def test_new_weights_are_those_that_the_next_search_uses(name, build):
    torch.manual_seed(3)
    model, other = (build(name, decoder_layers=2).eval() for _ in range(2))
    weights = other.state_dict()
    Transformer.prepare_for_decoding(other)
    expected = steps(other)
    Transformer.prepare_for_decoding(model)
    assert not torch.allclose(steps(model)[0], expected[0])
    model.load_state_dict(weights)
    for ours, theirs in zip(steps(model), expected):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_a_copy_has_kernels_too(build, monkeypatch):
    model = build("transformer_lstm_6l", decoder_layers=2, decoder_layer_agg="residual").eval()
    Transformer.prepare_for_decoding(model)
    expected, ran, run = steps(model), [], NativeStack.__call__
    monkeypatch.setattr(NativeStack, "__call__", lambda *args: ran.append(1) or run(*args))
    for ours, theirs in zip(steps(copy.deepcopy(model)), expected):
        torch.testing.assert_close(ours, theirs)
    assert len(ran) == 9


@torch.no_grad()
def test_hooks_of_layers_run_in_decoding_steps(build):
    model = build("transformer_prenorm_6l", decoder_layers=2).eval()
    Transformer.prepare_for_decoding(model)
    expected, seen = steps(model), []
    model.decoder.layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(output[0].shape))
    for ours, theirs in zip(steps(model), expected):
        torch.testing.assert_close(ours, theirs)
    assert len(seen) == 9


def test_hypotheses_with_padding_are_left_to_torch(build):
    """Their positions are not all seen, so there is no one number of them."""
    model = build("transformer_prenorm_6l", decoder_layers=1).eval()
    Transformer.prepare_for_decoding(model)
    x, state = torch.zeros(1, 4, model.decoder.stack.dim), {}
    shared = SharedBeamState()
    with torch.no_grad():
        for words in ([True] * 4, [True, False, True, True]):
            step = shared(state, 2, x, torch.tensor(words).unsqueeze(1))
            native = begin_step(model.decoder.layers, state, x, step)
            assert (native is None) == (not all(words))
    assert DecoderContext().native is None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded; the folder of the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._load_once.cache_clear()
    yield tmp_path / "fairseq_deep" / "native"
    library._load_once.cache_clear()


def fails(caplog, monkeypatch):
    """The one line for what stops :func:`load`, and the level of the line."""
    caplog.set_level(logging.INFO)
    assert load() is None and "torch's operations" in status()
    [record] = [record for record in caplog.records if record.name == library.__name__]
    return record.getMessage(), record.levelname


def test_without_a_compiler_one_line_says_so(cache, caplog, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    assert load() is None
    line = "decoding uses torch's operations: no C++ compiler was found; install one (g++) for faster decoding"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize("compiler, says", [
    ("false", "false failed: status 1"),
    ("/nowhere/g++", "cannot compile in "),
])
def test_a_compiler_that_fails_is_named(compiler, says, cache, caplog, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    caplog.set_level(logging.WARNING)
    assert load() is None
    [record] = caplog.records
    assert record.getMessage().startswith(f"decoding uses torch's operations: {says}")
    assert not list(cache.glob("*.so"))


def test_the_switch_turns_the_kernels_off(cache, caplog, monkeypatch):
    monkeypatch.setenv(library.SWITCH, "0")
    assert fails(caplog, monkeypatch) == ("decoding uses torch's operations: FAIRSEQ_DEEP_NATIVE is 0", "INFO")


def test_a_damaged_library_and_one_that_others_can_write_are_built_again(cache, tmp_path, monkeypatch):
    """With a compiler that takes no time, and a library that is not loaded."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho library > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    built, build = [], library._build
    monkeypatch.setattr(library, "_build", lambda: built.append(1) or build())
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: path)
    path = Path(load())
    assert path.parent == cache and len(built) == 1
    assert cache.stat().st_mode & 0o077 == 0

    def dangle():
        path.unlink()
        path.with_name(path.name.replace("-", "-0")).symlink_to(cache / "nowhere")

    for harm in (lambda: path.write_bytes(path.read_bytes()[:-1]), lambda: path.chmod(0o777), dangle):
        harm()
        library._load_once.cache_clear()
        assert load() == str(path) and path.stat().st_mode & 0o022 == 0
        library._load_once.cache_clear()
        assert load() == str(path)
    assert len(built) == 4
    monkeypatch.setattr(library, "_processor", lambda: frozenset({"avx2", "another"}))
    assert library._find() is None, "of another processor"


NARROW = """
import torch
import torch.nn.functional as F
from fairseq_deep.core.native import status
from fairseq_deep.core.native.packed import NativeLinear
assert "-mavx2" in status() or "avx512f" not in open("/proc/cpuinfo").read(), status()
torch.manual_seed(1)
for outputs, inputs in [(37, 5), (64, 33), (1, 8)]:
    for rows in (1, 5, 6, 7, 20):
        weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
        torch.testing.assert_close(NativeLinear(weight)(x, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
"""


def test_products_with_avx2_only(tmp_path):
    """In a process that is held to AVX2, with a library of its own."""
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", NARROW], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
