"""Admin's omega, profiled on the first training batch: which batch counts, and what is learned from it.

``tests/plugin/test_admin_profile.py`` has the recursion, and saved models; the closed form is in ``test_inits.py``.
"""

import copy

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from tests.helpers.models import POSTNORM

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


def test_half_precision_is_not_profiled(make, batch):
    """bfloat16, which old versions of torch know on a CPU, too."""
    model = make().bfloat16().train()
    with pytest.raises(UsageError) as error:
        model(*batch)
    text = str(error.value)
    assert "--admin-start profile requires fp32" in text and "--max-update 1" in text and "\n" not in text
    model.eval()(*batch)
    assert all(values.eq(1).all() for values in omegas(model).values()), "nor while translating"
