"""``--fast-dropout`` has the distribution of dropout.

The place of each dropout is proven in ``test_whole_models.py``, ``--retain-dropout`` in ``test_stock_fairseq.py``.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_deep.core.attention import LayerContext, MultiheadAttention
from fairseq_deep.core.dropout import Dropout, fast_dropout, speed_up_dropout
from fairseq_deep.core.stack import Stack
from tests.helpers.models import make_batch


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_its_distribution(probability):
    torch.manual_seed(1)
    x = torch.ones(401, 1003, dtype=torch.float64)
    y = fast_dropout(x, probability)
    torch.manual_seed(1)
    assert torch.equal(fast_dropout(x, probability), y)
    kept = y != 0
    error = 5 * (probability * (1 - probability) / x.numel()) ** 0.5 + 2**-17
    assert abs((~kept).double().mean() - probability) <= error
    assert abs(y.mean() - (1 if probability < 1 else 0)) <= 2 * error / max(1 - probability, 0.1)
    if probability < 1:
        torch.testing.assert_close(y[kept], x[kept] / (1 - probability), rtol=2e-4, atol=0)
    # no entry knows of its neighbours, of which four come from one number, nor rows of each other
    for shift, dim in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 0)):
        both = (kept & kept.roll(shift, dim)).double().mean()
        assert abs(both - (1 - probability) ** 2) <= 2 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (2, 2)], ids=str)
def test_its_gradient_is_the_mask(dtype, shape):
    x = torch.randn(shape).to(dtype).transpose(0, -1).requires_grad_()
    y = fast_dropout(x, 0.25)
    assert y.shape == x.shape and y.dtype == dtype
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * grad, rtol=0, atol=0)
    assert set(grad.flatten().tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


def test_all_parts_that_drop_entries_take_it(monkeypatch):
    model = nn.ModuleList([Dropout(0.5), Dropout(0.5), MultiheadAttention(Stack(1, 8, heads=2, attention_dropout=0.5))])
    speed_up_dropout(model)
    x = torch.ones(20, 3, 8)
    monkeypatch.setattr(F, "dropout", None)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None, raising=False)
    for part in list(model)[:2]:
        assert (part(x) == 0).any()
    out = [model[2](x, LayerContext(causal=True))[0] for _ in range(2)]
    assert not torch.equal(*out)
    model.eval()
    for part in list(model)[:2]:
        assert part(x) is x
    model[1].apply_during_inference = True  # --retain-dropout
    assert (model[1](x) == 0).any()


@pytest.mark.parametrize("flags", [{}, {"encoder_attn": "luna", "decoder_attn": "luna"}], ids=str)
def test_compiled_code_takes_torchs_dropout(flags, build, dictionary):
    """--fast-dropout with --compile: torch cannot compile the drawing of bits, nor layers that have it."""
    model = build("transformer_prenorm_6l", attention_dropout=0.1, encoder_layers=1, decoder_layers=1, **flags)
    speed_up_dropout(model.train())
    for layer in (model.encoder.layers[0], model.decoder.layers[0]):
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    source, lengths, target = make_batch(dictionary)
    model(source, lengths, target)[0].sum().backward()
