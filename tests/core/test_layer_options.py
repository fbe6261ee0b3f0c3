"""Options of layers: norms in half precision, shared heads in decoding; equations are in ``test_whole_models.py``."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core.norms import LanguageNorm, RmsNorm
from tests.helpers.models import PRENORM

S, B, C = 3, 2, 8


@pytest.mark.parametrize("fused", [True, False])
def test_squares_of_half_precision_may_be_beyond_it(fused, monkeypatch):
    """Also without torch's kernel, where older releases compute the squares in fp16."""
    if not fused:
        monkeypatch.setattr("fairseq_deep.core.norms.FUSED", False)
        monkeypatch.setattr(F, "rms_norm", None)
    large = torch.full((1, C), 300.0).half()
    for norm in (RmsNorm(C).half(), RmsNorm(C)):
        torch.testing.assert_close(norm(large), torch.ones(1, C).half())
    signs = torch.tensor([[[1.0, -1.0] * C]]).half()
    torch.testing.assert_close(LanguageNorm(1, 2 * C).half()(300 * signs, torch.tensor([1])), signs)


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
