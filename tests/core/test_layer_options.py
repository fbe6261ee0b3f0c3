"""Options of layers: half precision, tables of positions, shared heads; equations are in ``test_whole_models.py``."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_deep.core.attention.rotary import RotaryPositions
from fairseq_deep.core.attention.value_residual import ValueResidual
from fairseq_deep.core.norms import LanguageNorm, RmsNorm
from fairseq_deep.core.positions import SinusoidalPositions
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_a_value_residual_are_not_rounded(dtype):
    residual = ValueResidual()
    exact = torch.nn.init.constant_(residual.weight, 1 / 3).detach().clone()
    assert torch.equal(residual.to(dtype).weight, exact) and residual.weight.dtype == torch.float32


def test_tables_of_positions_that_grow_have_the_positions_of_long_ones():
    tokens, x = torch.tensor([[1, 5, 6, 1, *range(2, 9)]]), torch.randn(1, 2, 11, 6)
    short, long = (SinusoidalPositions(6, 1, length) for length in (4, 40))
    assert torch.equal(short(tokens), long(tokens)) and torch.equal(short.row(30), long.row(30))
    short, long = (RotaryPositions(6, length) for length in (4, 40))
    assert torch.equal(short(x), long(x)) and torch.equal(short(x, 30), long(x, 30))


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
