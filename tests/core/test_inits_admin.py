"""Admin's residual connections: omega in closed form, and profiled on the first training batch."""

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from tests.helpers.equations import functions, start
from tests.helpers.flags import parse
from tests.helpers.inits import DEPTH, train_step, with_connections
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import make_batch
from tests.helpers.tensors import shake
from tests.reference import naive_connections as naive


@pytest.mark.parametrize(
    "flags, encoder, decoder",  # of 4 connections in the encoder and 9 in the decoder
    [
        ({}, 1.4514, 1.8284),
        ({"admin_start": "logn"}, 1.4514, 1.8284),
        ({"admin_start": "1"}, 2.0, 3.0),
        ({"admin_start": "n"}, 1.0, 1.0),
    ],
)
def test_omega_starts_in_closed_form(flags, encoder, decoder, build):
    model = with_connections(build, "admin", **flags)
    for stack, omega in ((model.encoder, encoder), (model.decoder, decoder)):
        for layer in stack.layers:
            weight = layer.residual.weight
            assert weight.requires_grad
            torch.testing.assert_close(weight.detach(), torch.full_like(weight, omega), rtol=0, atol=5e-5)


FIRST = {"lengths": (5, 5, 5), "target_lengths": (6, 6, 6)}  # without padding, which no equation speaks of


def omegas(model):
    return {
        side: torch.cat([layer.residual.weight.detach() for layer in getattr(model, side).layers]) for side in DEPTH
    }


def profiled_by_hand(model, source, target):
    """omega of all connections of both stacks, as the recursion has it."""
    everything = lambda b, i, j: True  # noqa: E731
    memory, found = None, {}
    for side, tokens in (("encoder", source), ("decoder", target)):
        stack = getattr(model, side)
        x = start(stack, tokens)
        seen = (everything, lambda b, i, j: j <= i)
        pairs = [pair for layer in stack.layers for pair in functions(layer, memory, *seen)]
        found[side] = naive.profile(x, pairs)
        sublayers = [(f, naive.connect("admin", omega), norm) for (f, norm), omega in zip(pairs, found[side])]
        memory = naive.run_sublayers(x, sublayers, False)
    return found


def test_admin_profile_follows_the_recursion(build, dictionary):
    model = with_connections(build, "admin", admin_start="profile")
    source, lengths, target = make_batch(dictionary, **FIRST)
    with torch.no_grad():
        expected = profiled_by_hand(model, source, target)
        model.train()(source, lengths, target)
    for side, values in omegas(model).items():
        assert expected[side][0] == 1.0 and min(expected[side][1:]) > 1.1
        wanted = torch.tensor(expected[side]).unsqueeze(1).expand_as(values)
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("flags", [{}, {"checkpoint_activations": True}], ids=str)
def test_the_first_batch_is_profiled_and_trained_on(flags, build, batch):
    """Its output and its gradients are those of the profiled omega."""
    model = with_connections(build, "admin", admin_start="profile", **flags)
    first = train_step(model, batch)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(train_step(model, batch), first)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=lambda text, name=name: f"{name}: {text}")


def test_only_the_first_training_batch_is_profiled(build, dictionary):
    model = with_connections(build, "admin", admin_start="profile").eval()
    with torch.no_grad():
        model(*make_batch(dictionary))
        assert all(values.eq(1).all() for values in omegas(model).values()), "not while translating"
        model.train()(*make_batch(dictionary))
        first = omegas(model)
        assert all(values[1:].gt(1.1).all() for values in first.values())
        model(*make_batch(dictionary))
        for layer in (*model.encoder.layers, *model.decoder.layers):
            assert not layer.residual._forward_pre_hooks
    for side, values in omegas(model).items():
        assert torch.equal(values, first[side])


def test_a_profiled_model_is_not_profiled_again_when_loaded(build, dictionary, tmp_path):
    model = with_connections(build, "admin", admin_start="profile").train()
    with torch.no_grad():
        model(*make_batch(dictionary))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = with_connections(build, "admin", admin_start="profile").train()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    batch = make_batch(dictionary)
    with torch.no_grad():
        assert torch.equal(other(*batch)[0], model(*batch)[0])
    for side, values in omegas(other).items():
        assert torch.equal(values, omegas(model)[side])


@pytest.mark.parametrize("start", ["profile", "logn"])
def test_translating_needs_the_checkpoint_alone(start, dictionary, tmp_path):
    """fairseq builds the model from the flags that the checkpoint holds."""
    line = ["--arch", POST, "--encoder-embed-dim", "16", "--deep-init", "admin", "--admin-start", start]
    args = parse(*line)
    task = TranslationTask(args, dictionary, dictionary)
    model = task.build_model(args).train()
    batch = make_batch(dictionary)
    with torch.no_grad():
        model(*batch)
    shake(model, 0.3)
    history = [{"optimizer_name": "adam", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"args": args, "model": model.state_dict(), "optimizer_history": history, "extra_state": {}}
    torch.save(state, tmp_path / "model.pt")
    (loaded,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], task=task)
    for (name, value), again in zip(model.named_parameters(), loaded.parameters()):
        assert torch.equal(again, value), name
    assert torch.equal(loaded.eval()(*batch)[0], model.eval()(*batch)[0])
    loaded.train()(*batch)
    assert all(torch.equal(values, omegas(model)[side]) for side, values in omegas(loaded).items())


def test_half_precision_is_not_profiled(build, batch):
    """bfloat16, which old versions of torch know on a CPU, too."""
    model = with_connections(build, "admin", admin_start="profile").bfloat16().train()
    with pytest.raises(UsageError) as error:
        model(*batch)
    text = str(error.value)
    assert "--admin-start profile requires fp32" in text and "--max-update 1" in text and "\n" not in text
    model.eval()(*batch)


def test_a_batch_that_stopped_on_its_way_is_followed_by_a_new_start(build, dictionary):
    """As fairseq goes on after a batch that does not fit into memory."""
    model = with_connections(build, "admin", admin_start="profile")
    batch = make_batch(dictionary, **FIRST)
    with torch.no_grad():
        expected = profiled_by_hand(model, batch[0], batch[2])
    for module in (model.encoder.layers[1].fc2, model.decoder.layers[0].encoder_attn):
        handle = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            model.train()(*batch)
        handle.remove()
    model.train()(*batch)
    for side, values in omegas(model).items():
        wanted = torch.tensor(expected[side]).unsqueeze(1).expand_as(values)
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)


def test_a_number_from_a_configuration_file(build):
    model = with_connections(build, "admin", admin_start=1)
    assert bool((omegas(model)["decoder"] == 3.0).all())
