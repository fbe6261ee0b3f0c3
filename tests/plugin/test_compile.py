"""``--compile``: the same training with compiled calls, however deep the model and whatever the shapes of batches."""

import copy
import functools
import logging
import re

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from fairseq_deep.plugin.models import compiling, deep_transformer
from tests.helpers.commands import EXACT, PACKAGE, losses, run, train_command
from tests.helpers.models import make_batch

if not hasattr(torch, "compile") or compiling.why_not(torch.device("cpu"), "eager") is not None:
    pytest.skip("torch cannot compile here", allow_module_level=True)

SHALLOW = {"encoder_layers": 2, "decoder_layers": 2}
RANDOM = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
RECOMPUTED = {"checkpoint_activations": True}
PLAIN, LSTM = "transformer_prenorm_30l", "transformer_lstm_6l"


@pytest.fixture(autouse=True)
def fresh():
    """What one test has compiled is not there for the next."""
    torch._dynamo.reset()


@pytest.fixture
def backend(monkeypatch):
    """backend(name) chooses what compiles; "eager" runs what was traced as it is."""

    def choose(name):
        compile_calls = functools.partial(compiling.compile_calls, backend=name)
        monkeypatch.setattr(deep_transformer, "compile_calls", compile_calls)

    choose("eager")
    return choose


@pytest.fixture
def make(build, backend):
    """make(name, **flags): two models with the same weights, the second with --compile."""

    def twins(name, **flags):
        models = []
        for compiles in (False, True):
            torch.manual_seed(3)
            models.append(build(name, **{**SHALLOW, "compile": compiles, **flags}).train())
        return models

    return twins


@pytest.fixture
def batches(dictionary):
    return [
        make_batch(dictionary, (5, 7, 3), (4, 6, 6)),
        make_batch(dictionary, (9, 2, 4, 8), (3, 10, 2, 5)),
    ]


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
    for ours, theirs in zip(got[1], want[1]):
        torch.testing.assert_close(ours, theirs, **tolerance)


def said(caplog):
    """What was logged about compiling."""
    return [record for record in caplog.records if record.name == compiling.logger.name]


def assert_compiled(model):
    functions = model.compiler.functions
    assert functions and None not in functions.values()


@pytest.mark.parametrize(
    "how, name, flags",
    [
        ("aot_eager", LSTM, RECOMPUTED),
        ("aot_eager", PLAIN, {"encoder_layers": 1, "decoder_layers": 1, **RANDOM, **RECOMPUTED}),
        ("eager", PLAIN, {"encoder_layerdrop": 0.4}),
        ("eager", PLAIN, {"layer_agg": "residual-dual"}),
        ("eager", "transformer_hierarchical_6l", {}),
        ("eager", "transformer_routing_6l", {}),
        ("eager", "transformer_ode_6l", RECOMPUTED),
        ("eager", PLAIN, {"value_residual": True, **RECOMPUTED}),
    ],
)
def test_training_is_that_of_the_model_as_it_is(make, backend, batches, how, name, flags):
    """Losses and every gradient; backends with "aot" in their name make backward passes of their own, too.

    Attention is fused where it is compiled alone, so that rounding differs.
    """
    backend(how)
    plain, compiled = (model.double() for model in make(name, **flags))
    assert_same(train(compiled, batches), train(plain, batches), rtol=1e-7, atol=1e-9)
    assert_compiled(compiled)


def test_data_parallel_training_is_that_of_the_model_as_it_is(make, backend, batches, process_group):
    backend("aot_eager")
    plain, compiled = (model.double() for model in make(PLAIN, encoder_layers=1, decoder_layers=1))
    parallel = nn.parallel.DistributedDataParallel(compiled)
    assert_same(train(compiled, batches, wrapped=parallel), train(plain, batches), rtol=1e-7, atol=1e-9)
    assert_compiled(compiled)


@pytest.mark.parametrize("name", [PLAIN, LSTM])
def test_layers_share_what_is_compiled(make, batches, name):
    """Three times the depth compiles nothing more."""
    counts = []
    for depth in (1, 3):
        torch._dynamo.reset()
        compiled = make(name, encoder_layers=2 * depth, decoder_layers=2 * depth)[1]
        before = compiling.graphs()
        train(compiled, batches[:1])
        assert_compiled(compiled)
        counts.append(compiling.graphs() - before)
    assert counts[0] == counts[1]
    assert counts[0] <= 2 * len(compiled.compiler.functions), "one for each class, and for wanted attention weights"


def test_shapes_share_what_is_compiled(make, dictionary):
    compiled = make(PLAIN)[1]
    lengths = torch.randint(2, 20, (50, 2, 6)).tolist()
    sizes = torch.randint(1, 7, (50,)).tolist()
    before = compiling.graphs()
    train(compiled, [make_batch(dictionary, s[:size], t[:size]) for (s, t), size in zip(lengths, sizes)])
    assert_compiled(compiled)
    # with and without padding, with one sentence or more
    assert compiling.graphs() - before <= 12


def test_nothing_is_compiled_before_a_training_step(make, build, batch, monkeypatch):
    """A checkpoint has the flag in it, whoever loads it."""
    monkeypatch.setattr(deep_transformer, "compile_calls", lambda modules: pytest.fail("compiles"))
    plain, compiled = make(LSTM)
    build(LSTM, **SHALLOW, compile=True).set_num_updates(5)  # as where fairseq loads a checkpoint into a fresh model
    for mode in (True, False):
        assert torch.equal(compiled.train(mode)(*batch)[0], plain.train(mode)(*batch)[0])
    compiled.set_num_updates(5)
    with pytest.raises(pytest.fail.Exception, match="compiles"):
        compiled.train().set_num_updates(5)


def test_a_loaded_model_is_prepared_for_no_training(build, monkeypatch):
    """Nor is its memory kept, its dropout replaced, or a watch set on it."""
    monkeypatch.setattr(deep_transformer, "keep_memory", lambda: pytest.fail("keeps memory"))
    model = build(PLAIN, **SHALLOW, fast_dropout=True, log_depth_interval=6)
    model.set_num_updates(5)
    assert model.watch is None and not any(part._forward_hooks for part in model.modules())


def test_validation_and_generation_run_what_is_not_compiled(make, batches):
    plain, compiled = make(LSTM)
    train(compiled, batches[:1])
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
    assert compiling.graphs() == before


def test_names_and_copies_are_as_ever(make, batches):
    plain, compiled = make(PLAIN)
    train(compiled, batches[:1])
    assert list(compiled.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(compiled)
    before = compiling.graphs()
    copied(*batches[1])[0].sum().backward()
    assert compiling.graphs() == before, "a copy is not compiled"


@pytest.mark.parametrize("precision", ["half", "amp"])
def test_lower_precision(make, backend, batches, precision):
    backend("aot_eager")
    results = []
    models = [make(LSTM, encoder_layers=1, decoder_layers=1) for _ in range(2)]
    exact = train(models[0][0], batches[:1])
    for model in models[1]:
        model = model.bfloat16() if precision == "half" else model
        results.append(train(model, batches[:1], amp=precision == "amp"))
    assert_compiled(model)
    (_, want), (_, got) = results
    for ours, theirs, full in zip(got, want, exact[1]):
        assert ours.dtype == theirs.dtype
        # as far from the exact gradient as those of the model as it is
        far, own = ((grad.float() - full).norm() for grad in (ours, theirs))
        assert far <= 1.5 * own + 0.02 * full.norm() + 1e-5


def test_the_first_step_is_reported_once(make, batches, caplog):
    with caplog.at_level(logging.INFO, logger=compiling.logger.name):
        train(make(PLAIN)[1], batches)
    [record] = said(caplog)
    assert record.message.startswith("--compile: compiled ") and "the first step took" in record.message


def test_admin_profiles_its_first_batch_as_it_is(make, batches):
    plain, compiled = make("transformer_postnorm_6l", deep_init="admin", admin_start="profile")
    want, got = train(plain, batches), train(compiled, batches)
    assert_same(got, want, rtol=1e-4, atol=1e-6)
    assert_compiled(compiled)


class Breaking(nn.Linear):
    """Asks for a value, which a graph cannot hold."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def test_what_cannot_be_compiled_stays_as_it_is(caplog):
    torch.manual_seed(1)
    broken, x = Breaking(3, 3), torch.randn(2, 3)
    want = broken(x)
    compiling.compile_calls([broken], backend="eager")
    assert torch.equal(broken(x), want) and torch.equal(broken(x), want)
    [record] = said(caplog)
    assert record.levelname == "WARNING" and "--compile: Breaking is not compiled: " in record.message
    assert "\n" not in record.message


@pytest.fixture
def asked_again():
    compiling.why_not.cache_clear()
    yield
    compiling.why_not.cache_clear()


def fail(*args, **kwargs):
    raise RuntimeError("Dynamo is not supported on Python 9\nand so on")


@pytest.mark.parametrize(
    "broken, reason",
    [
        (fail, "RuntimeError: Dynamo is not supported on Python 9"),
        (lambda function, **options: function, "torch.compile is switched off"),
    ],
)
def test_without_a_compiler_training_goes_on(make, batches, monkeypatch, caplog, asked_again, broken, reason):
    plain, compiled = make(PLAIN)
    monkeypatch.setattr(torch, "compile", broken)
    assert_same(train(compiled, batches), train(plain, batches), rtol=0, atol=0)
    [record] = said(caplog)
    assert record.levelname == "WARNING" and reason in record.message and "\n" not in record.message


FLAGS = (*EXACT, "--max-update", "3")
TINY = "transformer_prenorm_2l2l_tiny"


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    return run(*train_command(data, tmp_path_factory.mktemp("plain"), *FLAGS, arch=TINY))


def norms(done):
    """The norm of all gradients in each update, as logged."""
    return [float(norm) for norm in re.findall(r'"gnorm": "([\d.]+)"', done.stdout + done.stderr)]


def test_training_compiles_and_generation_does_not(data, tmp_path, plain):
    if compiling.why_not(torch.device("cpu"), "inductor") is not None:
        pytest.skip("there is no compiler")
    done = run(*train_command(data, tmp_path, *FLAGS, "--compile", arch=TINY))
    assert losses(done) == pytest.approx(losses(plain), abs=2e-3)
    assert len(norms(done)) >= 3 and norms(done) == pytest.approx(norms(plain), abs=2e-3)
    [said] = re.findall(r"--compile: .*", done.stdout + done.stderr)
    assert re.fullmatch(r"--compile: compiled [1-9]\d* functions; the first step took [\d.]+ s", said)
    generated = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu")
    assert "--compile" not in generated.stdout + generated.stderr
    assert len(re.findall(r"^H-", generated.stdout, re.MULTILINE)) == 30


def test_without_a_compiler_one_line_says_so(data, tmp_path, plain, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = run(*train_command(data, tmp_path, *FLAGS, "--compile", arch=TINY), real=True)  # torch reads CXX early
    assert losses(done) == losses(plain)
    [said] = re.findall(r"--compile .*", done.stdout + done.stderr)
    assert said.startswith("--compile has no effect here; training continues without it: ") and "compiler" in said
