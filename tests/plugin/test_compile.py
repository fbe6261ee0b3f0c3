"""``--compile``: the same training with compiled calls, however deep the model and whatever the shapes of batches."""

import copy
import functools
import re

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from fairseq_deep.plugin.models import compiling, deep_transformer
from tests.helpers.commands import EXACT, PACKAGE, entries, hypotheses, run, train_command
from tests.helpers.models import make_batch

if not hasattr(torch, "compile") or compiling.why_not(torch.device("cpu"), "eager") is not None:
    pytest.skip("torch cannot compile here", allow_module_level=True)

SHALLOW = {"encoder_layers": 2, "decoder_layers": 2}
RANDOM = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
RECOMPUTED = {"checkpoint_activations": True}
PLAIN, POST, LSTM = "transformer_prenorm_30l", "transformer_postnorm_6l", "transformer_lstm_6l"


@pytest.fixture(autouse=True)
def fresh():
    """What one test has compiled is not there for the next."""
    torch._dynamo.reset()


@pytest.fixture
def make(build, monkeypatch):
    """make(name, backend, **flags): two models with the same weights, the second with --compile.

    The backend "eager" runs what was traced as it is; those with "aot" in their name make backward passes, too.
    """

    def twins(name, backend="eager", **flags):
        compile_calls = functools.partial(compiling.compile_calls, backend=backend)
        monkeypatch.setattr(deep_transformer, "compile_calls", compile_calls)
        models = []
        for compiles in (False, True):
            torch.manual_seed(3)
            models.append(build(name, **{**SHALLOW, "compile": compiles, **flags}).train())
        return models

    return twins


@pytest.fixture
def batches(dictionary):
    return [make_batch(dictionary), make_batch(dictionary, (9, 2, 4, 8), (3, 10, 2, 5))]


def train(model, batches, amp=False, wrapped=None):
    """Losses and last gradients of one step of training for each batch, as fairseq runs them.

    *wrapped* is what fairseq calls, if it is not the model itself.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for update, batch in enumerate(batches):
        torch.manual_seed(update)  # as fairseq does
        model.train()
        model.set_num_updates(update)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            output = (wrapped or model)(*batch)[0]
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        loss = F.cross_entropy(output.flatten(0, 1), batch[2].roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        model.perform_slowmo(optimizer)
        losses.append(loss.detach())
    return torch.stack(losses), [parameter.grad for parameter in model.parameters()]


def assert_same(got, want, **tolerance):
    torch.testing.assert_close(got[0], want[0], **tolerance)
    torch.testing.assert_close(got[1], want[1], **tolerance)


def said(caplog):
    """What was logged about compiling."""
    return [record for record in caplog.records if record.name == compiling.logger.name]


def assert_compiled(model):
    functions = model.compiler.functions
    assert functions and None not in functions.values()


SMALL = {"encoder_layers": 1, "decoder_layers": 1}


NEAR = {torch.float64: {"rtol": 1e-7, "atol": 1e-9}, torch.float32: {"rtol": 1e-4, "atol": 1e-6},
        torch.bfloat16: {"rtol": 0.1, "atol": 0.02}}  # fmt: skip


@pytest.mark.parametrize("backend, name, flags, dtype", [
    ("aot_eager", PLAIN, {**SMALL, **RANDOM, "encoder_layers": 0}, torch.float64),
    ("eager", LSTM, RECOMPUTED, torch.float64),
    ("eager", PLAIN, {"encoder_layerdrop": 0.4}, torch.float64),
    ("eager", POST, {"deep_init": "admin", "admin_start": "profile"}, torch.float32),  # the first batch, as it is
    ("eager", LSTM, SMALL, "amp"),
    *(pytest.param("eager", name, flags, torch.float64, marks=pytest.mark.nightly) for name, flags in [
        (PLAIN, {"value_residual": True, **RECOMPUTED}), (PLAIN, {"layer_agg": "residual-dual"}),
        ("transformer_hierarchical_6l", {}), ("transformer_routing_6l", {}), ("transformer_ode_6l", RECOMPUTED),
    ]),
    *(pytest.param("aot_eager", LSTM, {**SMALL, **flags}, dtype, marks=pytest.mark.nightly) for flags, dtype in [
        ({**RECOMPUTED, **RANDOM}, torch.float64), ({}, "amp"), ({}, torch.bfloat16),
    ]),
])  # fmt: skip
def test_training_is_that_of_the_uncompiled_model(make, batches, backend, name, flags, dtype):
    """Losses and every gradient; attention is fused only where it is compiled, so rounding differs."""
    amp = dtype == "amp"
    models = [model.to(torch.float32 if amp else dtype) for model in make(name, backend, **flags)]
    batches = batches if backend == "eager" and not amp else batches[:1]
    want, got = (train(model, batches, amp=amp) for model in models)
    assert_same(got, want, **NEAR[torch.bfloat16 if amp else dtype])
    assert_compiled(models[1])


def test_data_parallel_training_is_that_of_the_uncompiled_model(make, batches, process_group):
    plain, compiled = (model.double() for model in make(PLAIN, **SMALL))
    parallel = nn.parallel.DistributedDataParallel(compiled)
    assert_same(train(compiled, batches, wrapped=parallel), train(plain, batches), rtol=1e-7, atol=1e-9)
    assert_compiled(compiled)


@pytest.mark.parametrize("name", [PLAIN, LSTM])
def test_layers_and_shapes_share_what_is_compiled(make, dictionary, name):
    """A few graphs for each class of module, whatever the depth and the sizes of batches.

    They differ in padding, in one sentence or more, and in whether attention weights are wanted.
    """
    compiled = make(name, encoder_layers=3, decoder_layers=3)[1]
    lengths, sizes = torch.randint(2, 20, (8, 2, 6)).tolist(), torch.randint(1, 7, (8,)).tolist()
    before = compiling.graphs()
    train(compiled, [make_batch(dictionary, s[:size], t[:size]) for (s, t), size in zip(lengths, sizes)])
    assert_compiled(compiled)
    assert compiling.graphs() - before <= 4 * len(compiled.compiler.functions)


def test_only_a_training_step_compiles_and_prepares_a_model(make, build, batch, monkeypatch):
    """A checkpoint has the flags in it, whoever loads it, and fairseq loads it into a new model."""
    plain, compiled = make(LSTM)
    monkeypatch.setattr(deep_transformer, "compile_calls", lambda modules: pytest.fail("compiles"))
    monkeypatch.setattr(deep_transformer, "keep_memory", lambda: pytest.fail("keeps memory"))
    loaded = build(LSTM, **SHALLOW, compile=True, fast_dropout=True, log_depth_interval=6)
    loaded.set_num_updates(5)
    assert loaded.watch is None and not any(part._forward_hooks for part in loaded.modules())
    for mode in (True, False):
        assert torch.equal(compiled.train(mode)(*batch)[0], plain.train(mode)(*batch)[0])
    compiled.set_num_updates(5)
    with pytest.raises(pytest.fail.Exception):
        compiled.train().set_num_updates(5)


def test_validation_generation_and_copies_run_what_is_not_compiled(make, batches):
    plain, compiled = make(LSTM)
    train(compiled, batches[:1])
    assert list(compiled.state_dict()) == list(plain.state_dict())
    compiled.load_state_dict(plain.state_dict())
    before = compiling.graphs()
    source, lengths, target = batches[1]
    with torch.no_grad():
        outputs = []
        for model in (compiled.eval(), plain.eval()):
            encoded, state = model.encoder(source, lengths), {}
            steps = [model.decoder(target[:, : end + 1], encoded, incremental_state=state)[0] for end in range(3)]
            outputs.append((model(source, lengths, target)[0], *steps))
    for ours, theirs in zip(*outputs):
        assert torch.equal(ours, theirs)
    copy.deepcopy(compiled).train()(*batches[1])[0].sum().backward()
    assert compiling.graphs() == before


class Breaking(nn.Linear):
    """Asks for a value, which a graph cannot hold."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def test_a_layer_that_cannot_be_compiled_runs_as_it_is(caplog):
    torch.manual_seed(1)
    broken, x = Breaking(3, 3), torch.randn(2, 3)
    want = broken(x)
    compiling.compile_calls([broken], backend="eager")
    assert torch.equal(broken(x), want) and torch.equal(broken(x), want)
    [record] = said(caplog)
    assert record.levelname == "WARNING" and "--compile: Breaking is not compiled: " in record.message
    assert "\n" not in record.message


def fail(*args, **kwargs):
    raise RuntimeError("Dynamo is not supported on Python 9\nand so on")


@pytest.mark.parametrize("broken, backend, reason", [
    (fail, "eager", "RuntimeError: Dynamo is not supported on Python 9"),
    (lambda function, **options: function, "eager", "torch.compile is switched off"),
    (None, "inductor", "compiler"),
], ids=["python", "off", "no C++ compiler"])  # fmt: skip
def test_training_continues_without_a_compiler(make, batches, monkeypatch, caplog, tmp_path, broken, backend, reason):
    compiling.why_not.cache_clear()
    plain, compiled = make(PLAIN, backend)
    if broken:
        monkeypatch.setattr(torch, "compile", broken)
    else:
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(tmp_path / "missing"),))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert_same(train(compiled, batches), train(plain, batches), rtol=0, atol=0)
    [record] = said(caplog)
    compiling.why_not.cache_clear()
    assert record.levelname == "WARNING" and "\n" not in record.message
    assert record.message.startswith("--compile has no effect here; training continues without it: ")
    assert reason in record.message


def test_training_compiles_and_generation_does_not(data, tmp_path):
    if compiling.why_not(torch.device("cpu"), "inductor") is not None:
        pytest.skip("there is no compiler")
    flags = (*EXACT, "--max-update", "1", "--encoder-layers", "0", "--decoder-layers", "1", "--disable-validation")
    plain, done = (run(*train_command(data, tmp_path / name, *flags, *more, arch="transformer_prenorm_2l2l_tiny"))
                   for name, more in (("plain", ()), ("compiled", ("--compile",))))  # fmt: skip
    [expected], [found] = entries(plain).values(), entries(done).values()
    assert found == pytest.approx({**found, "loss": expected["loss"], "gnorm": expected["gnorm"]}, abs=2e-3)
    assert len(re.findall(r"--compile: compiled [1-9]\d* functions; the first step took [\d.]+ s", done.text)) == 1
    path = tmp_path / "compiled/checkpoint_last.pt"
    generated = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", path, "--cpu")
    assert "--compile" not in generated.text and len(hypotheses(generated)) == 30
