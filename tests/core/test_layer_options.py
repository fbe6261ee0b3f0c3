"""Options of layers: RMSNorm, gated feed-forward, shared heads in decoding; attentions are in ``test_attention.py``."""

import torch
import torch.nn.functional as F

from fairseq_deep.core.norms import RmsNorm
from tests.helpers.models import PRENORM
from tests.helpers.tensors import DOUBLE, assert_same, shake
from tests.reference.naive_attention import rms_norm

T, S, B, C = 4, 3, 2, 8


def test_rms_norm_equals_the_equation_also_in_half_precision():
    module, x = shake(RmsNorm(C).double()), torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    want = rms_norm(x, module.weight)
    assert_same(module(x), want, [x, module.weight])
    large = torch.full((1, C), 300.0).half()  # whose squares are beyond fp16
    torch.testing.assert_close(RmsNorm(C).half()(large), torch.ones(1, C).half())
    torch.testing.assert_close(RmsNorm(C)(large), torch.ones(1, C).half())


def test_rms_norm_in_fp16_without_torchs_fused_kernel(monkeypatch):
    """Older releases compute the squares in fp16."""
    monkeypatch.setattr("fairseq_deep.core.norms.FUSED", False)
    monkeypatch.setattr(F, "rms_norm", None)
    torch.testing.assert_close(RmsNorm(C).half()(torch.full((1, C), 300.0).half()), torch.ones(1, C).half())


def test_shared_heads_are_not_copied(build, dictionary, monkeypatch):
    """Caches hold the shared heads only; neither a step nor attention to the source repeats them."""
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", None)
    model = build(PRENORM, decoder_kv_heads=1).eval()
    state, attention = {}, model.decoder.layers[0].self_attn
    memory = model.encoder(torch.full((B, S), dictionary.eos()), torch.full((B,), S))
    model.decoder(torch.full((B, 1), dictionary.eos()), memory, incremental_state=state)
    source = model.decoder.layers[0].encoder_attn
    caches = [state[each._state] for each in (attention.own_cache, source.memory_cache)]
    heads = [entry.size(-3) for cache in caches for entry in cache.values() if entry is not None and entry.dim() > 2]
    assert attention.num_heads == 2 and len(heads) >= 3 and set(heads) == {1}


def test_a_stored_model_with_rotary_and_no_absolute_positions_loads(build):
    """transformer_modern with --no-token-positional-embeddings stored both flags before 2026-11-27."""
    model = build("transformer_prenorm_2l2l_tiny", rotary_positions=True, no_token_positional_embeddings=True)
    assert model.encoder.stack.positions == "rotary" and model.encoder.embed_positions is None
