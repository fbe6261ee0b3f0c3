"""Masks that are made once per forward pass, and without reading values of the batch: against slow forms, by count.

That attention computes the same with a mask and its additive form is in ``test_attention.py``; that a device is asked
for nothing, in ``test_device.py``.
"""

import types

import pytest
import torch

from fairseq_deep.core import encoder
from fairseq_deep.core.attention import MultiheadAttention, masks
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.decoder_attention import LUNA
from tests.helpers.methods import structure
from tests.helpers.models import make_batch, task_of, tiny_flags
from tests.helpers.tensors import DOUBLE, randomise

T, B, C, H = 6, 3, 10, 2
ATTENTIONS = ("self", "average", "merged", "merged-self", "merged-average", "ssru")
STRUCTURES = {structure(row): row.name for row in ARCHITECTURES.values()}.values()
# what connects layers has no masks: one structure of each kind by default, all at night
USUAL = ("transformer_lstm_two_6l", "transformer_dlcl_12l1l", "transformer_luna_6l", "transformer_modern_20l")
assert {*USUAL} <= {*STRUCTURES}


def padded(left=0, right=0):
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1, :left] = True
    mask[2, T - right :] = True
    return mask


@pytest.fixture
def never_asks(monkeypatch):
    """As on a GPU or under torch.compile, where masks are made without a look at the batch."""
    for module in (encoder, masks):
        monkeypatch.setattr(module, "is_sync_free", lambda x: False)


def results(model, batch, full_context):
    """Outputs for words, and every gradient of them."""
    model.zero_grad()
    torch.manual_seed(3)  # a few methods have dropout of their own
    encoded, words = model.encoder(*batch[:2]), batch[2].ne(model.decoder.padding_idx)
    output = model.decoder(batch[2], encoded, full_context_alignment=full_context)[0][words]
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(5), **DOUBLE)).sum().backward()
    return [output, *(p.grad for p in model.parameters() if p.grad is not None)]


RELATIVE = {"relative_positions": 2, "relative_values": True}
CASES = [pytest.param(name, {}, False, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in STRUCTURES]
CASES += [("transformer_prenorm_6l", {"decoder_attn": name}, False) for name in ATTENTIONS]
CASES += [("transformer_prenorm_6l", {"decoder_attn": name}, True) for name in ATTENTIONS if name != "ssru"]
CASES += [("transformer_prenorm_6l", {"decoder_attn": name, **RELATIVE}, False) for name in ("self", "merged-self")]


@pytest.mark.parametrize("name, flags, full_context", CASES, ids=str)
def test_a_model_that_never_asks_computes_the_same(name, flags, full_context, request, build, dictionary):
    """In fp64, with every gradient; sources padded, targets padded on the right, on the left, or not at all."""
    model = randomise(build(name, encoder_layers=2, decoder_layers=2, **flags).double()).train()
    source, lengths, target = make_batch(dictionary)
    left = torch.stack([torch.cat([row[row.eq(1)], row[row.ne(1)]]) for row in target])
    batches = {"right": (source, lengths, target), "full": make_batch(dictionary, (4, 4), (5, 5)),
               "left": (source, lengths, left)}  # fmt: skip
    expected = {kind: results(model, batch, full_context) for kind, batch in batches.items()}
    torch.testing.assert_close(expected["left"], expected["right"], rtol=1e-5, atol=1e-8)
    request.getfixturevalue("never_asks")
    for kind, batch in batches.items():
        for model.decoder.pads_right in (False,) if kind == "left" else (True, False):
            for got, want in zip(results(model, batch, full_context), expected[kind], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decoder_attn", ATTENTIONS)
def test_training_computes_no_weights_that_nobody_reads(build, batch, decoder_attn):
    model = build("transformer_prenorm_6l", decoder_attn=decoder_attn)
    shape = (*batch[2].shape, batch[0].size(1))
    assert model.train()(*batch)[1]["attn"] == [None]
    assert model(*batch, alignment_layer=2)[1]["attn"][0].shape == shape
    assert model.eval()(*batch)[1]["attn"][0].shape == shape
    model.train().decoder.aligns = True
    assert model(*batch)[1]["attn"][0].shape == shape


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


def test_what_the_task_says_is_checked_on_a_gpu(dictionary):
    masks.check_later(torch.tensor([True, True]), "wrong")
    with pytest.raises(RuntimeError):
        masks.check_later(torch.tensor([True, False]), "wrong")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_hidden_keys_have_no_weight_and_hidden_rows_are_finite(dtype, need_weights):
    """Also with large scores, and with padding that makes a whole sentence."""
    module = randomise(MultiheadAttention(Stack(1, C, heads=H))).to(dtype)
    query, mask = 20 * torch.randn(T, B, C, dtype=dtype), padded(2, 3)
    bias = masks.padding_bias(mask, dtype)
    endless = torch.zeros_like(bias).masked_fill(mask.view(B, 1, 1, T), float("-inf"))
    got, want = (module(query, key_padding_mask=each, need_weights=need_weights) for each in (bias, endless))
    assert torch.equal(got[0], want[0])
    assert not need_weights or torch.equal(got[1], want[1])
    mask[1] = True
    future = masks.future_mask(T, T, query, -1e4)
    for options in ({}, {"attn_mask": future}):
        output = module(query, key_padding_mask=mask, need_weights=need_weights, **options)[0]
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
