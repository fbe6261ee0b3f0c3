"""Admin's omega, profiled on the first training batch: which batch counts, what it learns from it, saved models.

The recursion is proven in ``test_whole_models.py``, the closed form in ``test_inits.py``.
"""

import copy

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from tests.helpers.flags import parse
from tests.helpers.models import POSTNORM, make_batch
from tests.helpers.tensors import shake

PROFILE = {"deep_init": "admin", "admin_start": "profile"}


@pytest.fixture
def make(build):
    return lambda **flags: build(POSTNORM, encoder_layers=2, decoder_layers=3, **{**PROFILE, **flags})


def omegas(model):
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return {side: torch.cat([layer.residual.weight.detach() for layer in of.layers]) for side, of in stacks.items()}


def test_batches_that_stopped_on_their_way_do_not_count(make, batch):
    """fairseq skips batches that do not fit into memory."""
    model = make().train()
    other = copy.deepcopy(model)
    for module in (model.encoder.layers[1].fc2, model.decoder.layers[0].encoder_attn):
        handle = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            model(*batch)
        handle.remove()
    model(*batch), other(*batch)
    torch.testing.assert_close(omegas(model), omegas(other))
    assert all(values[1:].gt(1.1).all() for values in omegas(model).values())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_batch_is_profiled_and_trained_on(recompute, make, batch):
    """Output and gradients are computed with the profiled omega."""
    model, results = make(checkpoint_activations=recompute).train(), []
    for _ in range(2):
        output = model(*batch)[0]
        results.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    torch.testing.assert_close(*results)


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
