"""C++ kernels against torch's operations: products, encoder layers; when they are used; how they are built.

Decoding steps are proven in ``test_steps.py``.
"""

import gc
import logging
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from fairseq_deep.core.attention.beams import SharedBeamState
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.steps import begin_step
from fairseq_deep.core.residuals.branchnorm import BranchNorm
from fairseq_deep.core.residuals.peri import PeriNorm
from fairseq_deep.errors import UsageError
from tests.helpers.steps import near, orders, steps_of_search, without_kernels

pytestmark = [pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}"),
              pytest.mark.usefixtures("no_gradients")]  # fmt: skip
LSTM, PRE = "transformer_lstm_6l", "transformer_prenorm_6l"


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", ["pre", "post", "swish", "rotary positions", "no norms", "modern", "sums between layers"]
)
def test_encoder_layers_are_those_of_torch(name, threads, prepared, monkeypatch):
    """With padding on the left, on the right, over a whole sentence, and without any."""
    flags, ran, call = {"encoder_kv_heads": 1} if name == "rotary positions" else {}, [], load().encoder_layers
    model = prepared(name, encoder_layers=3, **flags)
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


CHANGES = [
    "encoder.layers.0.fc1 is loaded", "decoder.layers.1.fc1 is loaded", "encoder.layers.0.fc1.bias is new",
    "encoder.layers.0.final_layer_norm.weight is new", "encoder.layers.0 trains",
    "encoder.layers.0.dropout_module drops", "encoder.layers.0.self_attn.dropout_module drops",
    "decoder.dropout_module drops", "encoder.layers.0.residual has norms", "encoder.layers.0.residual grows",
    # the network of h and the gates of an LSTM
    "decoder.aggregator.hidden.1.fc2 is loaded", "decoder.aggregator.gates.0.bias is new",
    "decoder.aggregator.hidden.1.layer_norm.weight is new", "decoder.aggregator.gates.0.norm_weight is new",
    "decoder.aggregator.hidden.1 trains", "decoder.aggregator.hidden.1.dropout drops",
]  # fmt: skip


def make_change(model, part, kind):
    owner, _, name = part.rpartition(".")
    owner, given = model.get_submodule(owner), getattr(model.get_submodule(owner), name)
    if kind == "is new":
        setattr(owner, name, torch.nn.Parameter(2 * given))
    elif kind == "is loaded":
        given.load_state_dict({key: 2 * value for key, value in given.state_dict().items()})
    elif kind == "drops":
        given.apply_during_inference = True
    elif kind == "trains":
        given.train()
    else:
        setattr(owner, name, (PeriNorm if kind == "has norms" else BranchNorm)(model.encoder.stack, 1))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_are_seen(change, prepared):
    """After kernels have run; dropout, which is left to torch, drops all."""
    flags = {"lstm_biases": True} if "aggregator" in change else {}
    model = prepared(LSTM if flags else PRE, dropout=1.0, attention_dropout=1.0, **flags)

    def run():
        return torch.cat([model.encoder(torch.arange(4, 18).view(2, 7), None)["encoder_out"][0].flatten(),
                          *map(torch.flatten, steps_of_search(model, orders(2)))])  # fmt: skip

    before = run()
    near(before, without_kernels(run))
    make_change(model, *change.split(" ", 1))
    near(run(), without_kernels(run))
    assert not torch.allclose(run(), before)


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


def test_a_switch_is_0_or_1(monkeypatch):
    monkeypatch.setenv(library.SWITCH, "off")
    with pytest.raises(UsageError, match="^FAIRSEQ_DEEP_NATIVE is off; set it to 0 or 1, or unset it$"):
        status()


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
