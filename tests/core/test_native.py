"""C++ kernels against torch's operations: products, encoder layers; when they are used; how they are built.

Decoding steps are proven in ``test_steps.py``.
"""

import functools
import gc
import logging
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from fairseq_deep.core.attention.beams import SharedBeamState
from fairseq_deep.core.layers import LayerContext
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.encoder import find_encoder
from fairseq_deep.core.native.steps import begin_step
from fairseq_deep.core.residuals.branchnorm import BranchNorm
from fairseq_deep.core.residuals.peri import PeriNorm
from tests.helpers.generation import near, prepared_model, without_kernels

pytestmark = [pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}"),
              pytest.mark.usefixtures("no_gradients")]  # fmt: skip
LSTM, PRE, POST = "transformer_lstm_6l", "transformer_prenorm_6l", "transformer_postnorm_6l"


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prepared(dictionary):
    return functools.partial(prepared_model, dictionary=dictionary)


ENCODERS = {
    "pre": (PRE, {}),
    "post": (POST, {"activation_fn": "swish"}),
    "no norms": (POST, {"deep_init": "tfixup"}),
    "kv heads": (PRE, {"encoder_kv_heads": 2, "rotary_positions": True}),
    "modern": ("transformer_modern_6l", {}),
    "sums between layers": ("transformer_dlcl_6l", {}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_layers_are_those_of_torch(name, threads, prepared, monkeypatch):
    """With padding on the left, on the right, over a whole sentence, and without any."""
    arch, flags = ENCODERS[name]
    model, ran, call = prepared(arch, encoder_layers=3, **flags), [], load().encoder_layers
    monkeypatch.setattr(load(), "encoder_layers", lambda *args: ran.append(args[1].value) or call(*args))
    for length in (1, 4, 21):
        source = torch.randint(4, 30, (5, length))
        for padded in (False, True):
            if padded:
                source[0, : length // 2], source[1, -length // 3 :], source[2] = 1, 1, 1
            found, calls = model.encoder(source, None)["encoder_out"], len(ran)
            near(found, without_kernels(lambda x=source: model.encoder(x, None)["encoder_out"]))
            assert len(ran) == calls
    assert sum(ran) == 6 * 3 and len(ran) == (6 * 3 if name == "sums between layers" else 6)


def lstm_inputs(lstm, rows=13):
    width = lstm.gates[0].weight.size(1) - lstm.dim
    return [torch.randn(1, rows, lstm.dim) for _ in range(2)], torch.randn(1, rows, width)


def doubled(module, name):
    setattr(module, name, torch.nn.Parameter(2 * getattr(module, name)))


def load_doubled(linear):
    linear.load_state_dict({name: 2 * value for name, value in linear.state_dict().items()})


# what other kernels follow, and after a None what is left to torch: of a layer (and its stack), and of an LSTM's parts
CHANGES = {
    "layer": [
        lambda layer, stack: load_doubled(layer.fc1),
        lambda layer, stack: doubled(layer.final_layer_norm, "weight"),
        lambda layer, stack: doubled(layer.fc1, "bias"),
        None,
        lambda layer, stack: layer.train(),
        lambda layer, stack: setattr(layer.dropout_module, "apply_during_inference", True),
        lambda layer, stack: setattr(layer.self_attn.dropout_module, "apply_during_inference", True),
        lambda layer, stack: setattr(layer, "residual", PeriNorm(stack, 1)),
        lambda layer, stack: setattr(layer, "residual", BranchNorm(stack, 1)),
    ],
    "lstm": [
        lambda hidden, gates: load_doubled(hidden.fc2),
        lambda hidden, gates: doubled(gates, "bias"),
        lambda hidden, gates: doubled(hidden.layer_norm, "weight"),
        lambda hidden, gates: doubled(gates, "norm_weight"),
        None,
        lambda hidden, gates: hidden.train(),
        lambda hidden, gates: setattr(hidden.dropout, "apply_during_inference", True),
    ],
}


@pytest.mark.parametrize("kind, number", [(kind, number) for kind, changes in CHANGES.items()
                                          for number, change in enumerate(changes) if change])  # fmt: skip
def test_changes_of_a_module_are_seen(kind, number, prepared):
    change, follows = CHANGES[kind][number], number < CHANGES[kind].index(None)
    if kind == "layer":
        encoder = prepared(PRE, attention_dropout=0.1, encoder_layers=1).encoder
        parts, x = (encoder.layers[0], encoder.stack), torch.randn(7, 3, encoder.stack.dim)
        find, torchs = lambda: find_encoder(encoder, x, None), lambda: [parts[0](x, LayerContext())[0]]
        run = lambda native: [native(x, None)]  # noqa: E731
    else:
        lstm = prepared(LSTM, lstm_biases=True, dropout=0.1).decoder.aggregator
        (state, attention), parts = lstm_inputs(lstm, 5), (lstm.hidden[1], lstm.gates[0])
        find, torchs = lambda: lstm._native(state[0], 1), lambda: lstm.write(state, 1, attention)
        run = lambda native: native(state[0], attention, state[1])  # noqa: E731
        assert find() is not lstm._native(state[0], 0)
    first = find()
    assert first is not None and find() is first
    change(*parts)
    found = find()
    assert (found is not None) == follows
    if follows:
        assert found is not first and not torch.allclose(run(found)[0], run(first)[0])
        near(run(found), without_kernels(torchs))


def test_hypotheses_with_padding_are_left_to_torch(prepared):
    """Their positions are not all seen, so there is no one number of them."""
    model = prepared(PRE)
    x, state, shared = torch.zeros(1, 4, model.decoder.stack.dim), {}, SharedBeamState()
    for words in ([True] * 4, [True, False, True, True]):
        step = shared(state, 2, x, torch.tensor(words).unsqueeze(1))
        assert (begin_step(model.decoder.layers, x, step) is None) == (not all(words))


def test_the_kernels_do_not_keep_a_layer(prepared):
    model, lstm = prepared("transformer_modern_6l"), prepared(LSTM)
    model.decoder.start(model.encoder(torch.tensor([[5, 6, 2]]), None)).step(torch.tensor([2]))
    assert lstm.decoder.aggregator._native(torch.randn(1, 2, lstm.decoder.stack.dim), 0) is not None
    parts = (model.encoder.layers[0], model.decoder.layers[0], lstm.decoder.aggregator.hidden[0])
    kept = [weakref.ref(part) for part in parts]
    del model, lstm, parts
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded; the folder of the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._load_once.cache_clear()
    yield tmp_path / "fairseq_deep" / "native"
    library._load_once.cache_clear()


@pytest.mark.parametrize("name, value, level, says", [
    ("PATH", "", "INFO", "no C++ compiler was found; install one (g++) for faster decoding"),
    ("CXX", "false", "WARNING", "false failed: status 1"),
    ("CXX", "/nowhere/g++", "WARNING", "cannot compile in "),
    (library.SWITCH, "0", "INFO", "FAIRSEQ_DEEP_NATIVE is 0"),
])  # fmt: skip
def test_one_line_says_why_there_are_no_kernels(name, value, level, says, cache, caplog, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", shutil.which if value else lambda command: None)
    caplog.set_level(logging.INFO)
    assert load() is None
    lines = [record for record in caplog.records if "compiling" not in record.getMessage()]
    assert [record.levelname for record in lines] == [level]
    assert lines[0].getMessage().startswith(f"decoding uses torch's operations: {says}")
    assert name != library.SWITCH or status() == f"torch's operations ({says})"
    assert not list(cache.glob("*.so"))


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


def test_the_library_has_the_instructions_that_torch_uses():
    narrow = torch.backends.cpu.get_cpu_capability() == "AVX2" and "avx512f" in Path("/proc/cpuinfo").read_text()
    assert ("-mavx2" in status()) is narrow
