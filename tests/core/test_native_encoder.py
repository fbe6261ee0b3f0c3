"""Encoder layers in compiled kernels against torch's operations, and when they are used."""

import gc
import weakref

import pytest
import torch

from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.layers import encoder_layer
from fairseq_deep.core.native import library, load, status
from fairseq_deep.core.native.encoder import NativeEncoderLayer, find_encoder_layer
from fairseq_deep.core.residuals.branchnorm import BranchNorm
from fairseq_deep.core.residuals.peri import PeriNorm
from fairseq_deep.core.transformer import Transformer

pytestmark = pytest.mark.skipif(load() is None, reason=f"decoding uses {status()}")

ENCODERS = {
    "pre": ("transformer_prenorm_6l", {}),
    "post": ("transformer_postnorm_6l", {"activation_fn": "swish"}),
    "no norms": ("transformer_postnorm_6l", {"deep_init": "tfixup"}),
    "kv heads": ("transformer_prenorm_6l", {"encoder_kv_heads": 2, "rotary_positions": True}),
    "modern": ("transformer_modern_6l", {}),
    "sums between layers": ("transformer_dlcl_6l", {}),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoder_layers_are_those_of_torch(name, threads, build, monkeypatch):
    """With padding on the left, on the right, over a whole sentence, and without any."""
    arch, flags = ENCODERS[name]
    torch.manual_seed(3)
    model = build(arch, encoder_layers=3, decoder_layers=1, **flags).eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    Transformer.prepare_for_decoding(model)
    ran, run = [], NativeEncoderLayer.__call__
    monkeypatch.setattr(NativeEncoderLayer, "__call__", lambda *args: ran.append(1) or run(*args))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for length in (1, 4, 21):
            source = torch.randint(4, 30, (5, length))
            for padded in (False, True):
                if padded:
                    source[0, : length // 2], source[1, -length // 3 :], source[2] = 1, 1, 1
                ran.clear()
                ours = model.encoder(source, None)["encoder_out"][0]
                assert len(ran) == 3
                with monkeypatch.context() as patch:
                    patch.setattr(library, "enabled", False)
                    theirs = model.encoder(source, None)["encoder_out"][0]
                assert len(ran) == 3
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_an_encoder_layer_in_int8_is_that_of_its_parts(build, monkeypatch):
    model = build("transformer_modern_6l", encoder_layers=2, decoder_layers=1).eval()
    Transformer.prepare_for_decoding(model)
    decode_in(model, "int8")
    layer, x = model.encoder.layers[0], torch.randn(7, 3, model.encoder.stack.dim)
    native = find_encoder_layer(layer, x)
    ours = native(x, None)
    monkeypatch.setattr(encoder_layer, "find_encoder_layer", lambda *_: None)
    torch.testing.assert_close(ours, layer(x, None), rtol=0, atol=2e-2)
    assert float((ours - layer(x, None)).abs().mean()) < 1e-4, "a rounding more or less is rare"


CHANGES = ["train", "dropout", "attention dropout", "residual", "growing", "weights", "norm", "bias"]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_of_an_encoder_layer_are_seen(change, build):
    model = build("transformer_prenorm_6l", encoder_layers=1, decoder_layers=1, attention_dropout=0.1).eval()
    Transformer.prepare_for_decoding(model)
    layer, x = model.encoder.layers[0], torch.randn(7, 3, model.encoder.stack.dim)
    first = find_encoder_layer(layer, x)
    assert first is not None and find_encoder_layer(layer, x) is first
    if change in ("weights", "norm", "bias"):
        if change == "bias":
            layer.fc1.bias = torch.nn.Parameter(layer.fc1.bias + 1)
        elif change == "norm":
            layer.final_layer_norm.weight = torch.nn.Parameter(2 * layer.final_layer_norm.weight)
        else:
            layer.fc1.load_state_dict({name: 2 * value for name, value in layer.fc1.state_dict().items()})
        found = find_encoder_layer(layer, x)
        assert found not in (None, first) and not torch.allclose(found(x, None), first(x, None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "enabled", False)
            torch.testing.assert_close(found(x, None), layer(x, None), rtol=1e-5, atol=2e-5)
        return
    if change == "train":
        layer.train()
    elif change == "dropout":
        layer.dropout_module.apply_during_inference = True
    elif change == "attention dropout":
        layer.self_attn.retain_dropout = True
    else:
        residual = {"residual": PeriNorm, "growing": BranchNorm}[change]
        layer.residual = residual(model.encoder.stack, 1)
    assert find_encoder_layer(layer, x) is None


@torch.no_grad()
def test_the_kernels_do_not_keep_a_layer(build):
    model = build("transformer_modern_6l", encoder_layers=2, decoder_layers=1).eval()
    Transformer.prepare_for_decoding(model)
    assert find_encoder_layer(model.encoder.layers[0], torch.randn(2, 1, model.encoder.stack.dim)) is not None
    kept = weakref.ref(model.encoder.layers[0])
    lstm = build("transformer_lstm_6l", decoder_layers=2).eval()
    Transformer.prepare_for_decoding(lstm)
    assert lstm.decoder.aggregator._native(torch.randn(1, 2, lstm.decoder.stack.dim), 0) is not None
    hidden = weakref.ref(lstm.decoder.aggregator.hidden[0])
    del model, lstm
    gc.collect()
    assert kept() is hidden() is None
