"""Admin's residual connections: omega in closed form, and profiled on the first training batch."""

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from tests.helpers.equations import functions, start
from tests.helpers.flags import parse
from tests.helpers.models import POSTNORM, make_batch
from tests.helpers.tensors import shake
from tests.reference import naive_connections as naive

PROFILE = {"deep_init": "admin", "admin_start": "profile"}
FIRST = {"lengths": (5, 5, 5), "target_lengths": (6, 6, 6)}  # without padding, which no equation speaks of


@pytest.fixture
def make(build):
    """make(**flags): a model with 4 connections in the encoder and 9 in the decoder."""
    return lambda **flags: build(POSTNORM, encoder_layers=2, decoder_layers=3, **{**PROFILE, **flags})


def omegas(model):
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return {side: torch.cat([layer.residual.weight.detach() for layer in of.layers]) for side, of in stacks.items()}


@pytest.mark.parametrize("how, encoder, decoder", [("logn", 1.4514, 1.8284), (1, 2.0, 3.0), ("n", 1.0, 1.0)])
def test_omega_starts_in_closed_form(how, encoder, decoder, make):
    """The start may be a number, as in a configuration file."""
    model = make(admin_start=how)
    assert all(layer.residual.weight.requires_grad for layer in model.encoder.layers)
    for values, omega in zip(omegas(model).values(), (encoder, decoder)):
        torch.testing.assert_close(values, torch.full_like(values, omega), rtol=0, atol=5e-5)


def profiled_by_hand(model, source, target):
    """omega of all connections of both stacks, as the recursion has it."""
    memory, found = None, {}
    for side, tokens in (("encoder", source), ("decoder", target)):
        stack = getattr(model, side)
        x = start(stack, tokens)
        seen = (lambda b, i, j: True, lambda b, i, j: j <= i)
        pairs = [pair for layer in stack.layers for pair in functions(layer, memory, *seen)]
        found[side] = naive.profile(x, pairs)
        sublayers = [(f, naive.connect("admin", omega), norm) for (f, norm), omega in zip(pairs, found[side])]
        memory = naive.run_sublayers(x, sublayers, False)
    return found


@pytest.mark.parametrize("interrupted", [False, True], ids=["", "interrupted"])
def test_the_profile_follows_the_recursion(interrupted, make, dictionary):
    """Also after batches that stopped on their way, as fairseq skips those that do not fit into memory."""
    model, batch = make().train(), make_batch(dictionary, **FIRST)
    with torch.no_grad():
        expected = profiled_by_hand(model, batch[0], batch[2])
    for module in (model.encoder.layers[1].fc2, model.decoder.layers[0].encoder_attn) if interrupted else ():
        handle = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            model(*batch)
        handle.remove()
    model(*batch)
    for side, values in omegas(model).items():
        assert expected[side][0] == 1.0 and min(expected[side][1:]) > 1.1
        wanted = torch.tensor(expected[side]).unsqueeze(1).expand_as(values)
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_batch_is_profiled_and_trained_on(recompute, make, batch):
    """Its output and its gradients are those of the profiled omega."""
    model, results = make(checkpoint_activations=recompute).train(), []
    for _ in range(2):
        output = model(*batch)[0]
        results.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    for first, second in zip(*results):
        torch.testing.assert_close(first, second)


@torch.no_grad()
def test_only_the_first_training_batch_is_profiled(make, dictionary):
    model = make().eval()
    model(*make_batch(dictionary))
    assert all(values.eq(1).all() for values in omegas(model).values()), "not while translating"
    model.train()(*make_batch(dictionary))
    first = omegas(model)
    assert all(values[1:].gt(1.1).all() for values in first.values())
    model(*make_batch(dictionary))
    assert all(torch.equal(values, first[side]) for side, values in omegas(model).items())
    layers = (*model.encoder.layers, *model.decoder.layers)
    assert not any(layer.residual._forward_pre_hooks for layer in layers)


@torch.no_grad()
@pytest.mark.parametrize("how", ["profile", "logn"])
def test_a_loaded_model_is_not_profiled_again(how, dictionary, tmp_path):
    """fairseq builds the model from the flags that the checkpoint holds."""
    args = parse("--arch", POSTNORM, "--encoder-embed-dim", "16", "--deep-init", "admin", "--admin-start", how)
    task, batch = TranslationTask(args, dictionary, dictionary), make_batch(dictionary)
    model = task.build_model(args).train()
    model(*batch)
    shake(model, 0.3)
    history = [{"optimizer_name": "adam", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"args": args, "model": model.state_dict(), "optimizer_history": history, "extra_state": {}}
    torch.save(state, tmp_path / "model.pt")
    (loaded,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], task=task)
    assert torch.equal(loaded.eval()(*batch)[0], model.eval()(*batch)[0])
    loaded.train()(*batch)
    for (name, value), again in zip(model.named_parameters(), loaded.parameters()):
        assert torch.equal(again, value), name


def test_half_precision_is_not_profiled(make, batch):
    """bfloat16, which old versions of torch know on a CPU, too."""
    model = make().bfloat16().train()
    with pytest.raises(UsageError) as error:
        model(*batch)
    text = str(error.value)
    assert "--admin-start profile requires fp32" in text and "--max-update 1" in text and "\n" not in text
    model.eval()(*batch)
