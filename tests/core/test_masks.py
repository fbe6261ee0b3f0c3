"""Masks that are made once per forward pass: their additive form, and what the task says of them.

Models with masks of all kinds are in ``test_whole_models.py``; that a device is asked for nothing, in
``test_device.py``.
"""

import types

import pytest
import torch

from fairseq_deep.core.attention import LayerContext, MultiheadAttention, masks
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.methods import LUNA
from tests.helpers.models import make_batch, task_of, tiny_flags
from tests.helpers.tensors import shake

T, B, C, H = 6, 3, 10, 2


@pytest.mark.parametrize("kind", ["cfg", "args"])
def test_the_task_says_where_targets_are_padded_and_whether_it_aligns(dictionary, kind):
    name = "transformer_prenorm_6l"

    def decoder_of(**flags):
        task = task_of(dictionary)
        setattr(task, kind, types.SimpleNamespace(**flags))
        args = types.SimpleNamespace(arch=name, **tiny_flags(name))
        ARCHITECTURES[name].apply(args)
        return DeepTransformerModel.build_model(args, task).decoder

    assert decoder_of(left_pad_target=False).pads_right
    assert not decoder_of(left_pad_target=True).pads_right
    assert not decoder_of().pads_right
    assert decoder_of(load_alignments=True).aligns
    assert not decoder_of(load_alignments=False).aligns


def test_what_the_task_says_is_checked_on_a_gpu(monkeypatch):
    class OfGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(masks, "is_sync_free", lambda x: False)
    right = torch.tensor([[False, True], [True, True]]).as_subclass(OfGpu)
    assert masks.seen_padding(right, causal=True, on_right=True) is None
    with pytest.raises(RuntimeError):
        masks.seen_padding(right.flip(1), causal=True, on_right=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_hidden_keys_have_no_weight_and_hidden_rows_are_finite(dtype, need_weights):
    """Also with large scores, and with padding that makes a whole sentence."""
    module = shake(MultiheadAttention(Stack(1, C, heads=H)), 1.0).to(dtype)
    query, mask = 20 * torch.randn(T, B, C, dtype=dtype), torch.zeros(B, T, dtype=torch.bool)
    mask[1, :2] = mask[2, 3:] = True
    bias = masks.padding_bias(mask, dtype)
    endless = torch.zeros_like(bias).masked_fill(mask.view(B, 1, 1, T), float("-inf"))
    got, want = (module(query, LayerContext(padding=each), need_weights) for each in (bias, endless))
    assert torch.equal(got[0], want[0])
    assert not need_weights or torch.equal(got[1], want[1])
    mask[1] = True
    future = masks.future_mask(T, T, query, -1e4)
    for options in ({}, {"mask": future}):
        output = module(query, LayerContext(padding=mask, **options), need_weights)[0]
        assert output.isfinite().all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("flags", [{}, LUNA], ids=["", "luna"])
def test_a_source_of_padding_alone_spoils_nothing(flags, build, dictionary, training):
    model = build("transformer_prenorm_6l", **flags).train(training)
    source, lengths, target = make_batch(dictionary)
    expected = model(source, lengths, target)[0]
    source[1] = dictionary.pad()
    actual = model(source, lengths, target)[0]
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]])
    actual.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
