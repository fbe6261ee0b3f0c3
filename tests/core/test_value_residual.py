"""Value residual: self-attentions that also read the values of the first layer; equations, wiring, training."""

import pytest
import torch

from tests.helpers.methods import NO_FFN
from tests.helpers.models import POSTNORM, PRENORM

VALUES = {"value_residual": True}
MODELS = {
    "post-norm": (POSTNORM, {"decoder_attn": "merged-self"}),
    "DLCL": ("transformer_dlcl_2l2l_tiny", {"relative_positions": 2, "relative_values": True}),
    "bare": (PRENORM, {"layer_agg": "hyper-connections", "decoder_kv_heads": 1}),
    "LSTM": (PRENORM, {"layer_agg": "lstm", "rotary_positions": True, **NO_FFN}),
}


@pytest.fixture
def make(build):
    def model(kind, **flags):
        name, own = MODELS[kind]
        return build(name, **{"encoder_layers": 3, "decoder_layers": 3, **own, **flags})

    return model


def of_layers(model):
    """The self-attentions of both stacks, each from the first layer on."""
    for stack in (model.encoder, model.decoder):
        yield [layer.self_attn for layer in stack.layers if getattr(layer, "self_attn", None) is not None]


@pytest.mark.parametrize("kind", MODELS)
def test_weights_start_as_the_mean_and_the_lowest_layer_has_none(kind, make):
    """A model without them may be the start of one with them."""
    plain, model = make(kind), make(kind, **VALUES)
    for lowest, *others in of_layers(model):
        assert len(others) == 2 and lowest.value_residual is None
        assert all(other.value_residual.weight.tolist() == [0.5, 0.5] for other in others)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == 4 and not unexpected


@pytest.mark.parametrize("flags", [{}, {"checkpoint_activations": True}, {"offload_activations": True}], ids=str)
def test_a_second_backward_pass_gives_the_same_gradients(flags, make, batch):
    """Where the first layer, recomputed, has set the values again."""
    model = make("DLCL", **VALUES, **flags, dropout=0.1).train()
    loss, parameters = model(*batch)[0].square().mean(), [*model.parameters()]
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    for first, second in zip(once, torch.autograd.grad(loss, parameters)):
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-7)
