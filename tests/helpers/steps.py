"""Decoding steps: a table of models, and one script of a search that all engines run."""

import functools

import pytest
import torch

from fairseq_deep.core.native import library

LSTM, PRE, POST = "transformer_lstm_6l", "transformer_prenorm_6l", "transformer_postnorm_6l"
SENTENCES, BEAM, PAD, STEPS = 3, 3, 1, 12
near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-5)

# architecture, flags, and what kernels run in a step of two layers: all of it, all layers one by one, attentions and
# LSTM, or a number of attentions, around which PyTorch runs the layers
MODELS = {
    "pre": (PRE, {}, "all"),
    "post": (POST, {}, "all"),
    "rms": (PRE, {"norm": "rms"}, "all"),
    "kv heads": (PRE, {"decoder_attention_heads": 4, "decoder_kv_heads": 2}, "all"),
    "swish": (PRE, {"activation_fn": "swish"}, "all"),
    "rotary positions": (PRE, {"rotary_positions": True, "decoder_kv_heads": 1}, "all"),
    "learned positions": (PRE, {"decoder_learned_pos": True}, "all"),
    "modern": ("transformer_modern_6l", {}, "all"),
    "factor": (PRE, {"residual": "completep"}, "all"),
    "modern post-norm": (POST, {"ffn": "swiglu", "rotary_positions": True}, "all"),
    "no norms": (POST, {"deep_init": "tfixup"}, "all"),
    "language model": (PRE, {"no_cross_attention": True}, "all"),
    "quantisation noise": (PRE, {"quant_noise_pq": 0.1}, "layers"),  # with a matrix between embeddings and layers
    "sums between layers": ("transformer_dlcl_6l", {}, "layers"),
    "a memory per layer": (PRE, {"decoder_memory": "transparent"}, "all"),
    "other layers": (PRE, {"activation_fn": "gelu", "rotary_positions": True}, 4),
    "relative positions": (PRE, {"relative_positions": 2, "relative_values": True}, 2),
    "value residual": (PRE, {"value_residual": True}, 0),
    "average attention": (PRE, {"decoder_attn": "average"}, 2),
    "SSRU": (PRE, {"decoder_attn": "ssru"}, 2),
    "merged attention": (POST, {"decoder_attn": "merged"}, 2),
    "merged self-attention": (PRE, {"decoder_attn": "merged-self"}, 4),
    "merged average": (PRE, {"decoder_attn": "merged-average"}, 2),
    "Luna": (POST, {"encoder_attn": "luna", "decoder_attn": "luna"}, 0),
    "LSTM": (LSTM, {}, "lstm"),
    "LSTM of both attentions": (LSTM, {"lstm_merge": "concat"}, "lstm"),
    "LSTM with biases": (LSTM, {"lstm_biases": True}, "lstm"),
    "languages": (PRE, {"language_norm": True, "language_transform": True}, 4),
}


def without_kernels(run):
    """What *run* returns where C++ kernels are off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "enabled", False)
        return run()


def orders(count, leave=()):
    """New orders of hypotheses within their sentences; at the steps *leave*, the second sentence has ended."""
    draws, sentences = torch.Generator().manual_seed(1), SENTENCES
    for step in range(count):
        kept = torch.arange(sentences) if step not in leave else torch.tensor([0, 2])
        sentences = len(kept)
        yield (kept.unsqueeze(1) * BEAM + torch.randint(BEAM, (sentences, BEAM), generator=draws)).flatten()


def batch(model, count):
    """An encoded batch with padding, and *count* words of each hypothesis."""
    draws = torch.Generator().manual_seed(2)
    source = torch.randint(4, 40, (SENTENCES, 21), generator=draws)
    source[0, :4], source[2, :9] = PAD, PAD
    source[1, 0], source[2, 9] = 30, 35  # tags, if the model knows languages
    words = torch.randint(4, 30, (SENTENCES * BEAM, count), generator=draws)
    return model.encoder(source, source.ne(PAD).sum(1)), words


def steps(model, new_orders, state=None, padded=()):
    """The scores of a step before each order and one at the end, as fairseq's search asks; words are *padded*."""
    new_orders, scores, state = [*new_orders, None], [], {} if state is None else state
    encoded, words = batch(model, len(new_orders))
    encoded = model.encoder.reorder_encoder_out(encoded, torch.arange(SENTENCES).repeat_interleave(BEAM))
    for row, column in padded:
        words[row, column] = PAD
    for length, order in enumerate(new_orders, start=1):
        scores.append(model.decoder(words[:, :length], encoder_out=encoded, incremental_state=state)[0])
        if order is not None:
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded, words = model.encoder.reorder_encoder_out(encoded, order), words[order]
    return scores


def steps_of_search(model, new_orders, one_by_one=False):
    """The scores of :func:`steps`, as the search of this package asks.

    With *one_by_one*, the first step has one hypothesis per sentence.
    """
    new_orders, scores = [*new_orders, None], []
    encoded, words = batch(model, len(new_orders))
    state = model.decoder.start(encoded, BEAM)
    for step, order in enumerate(new_orders):
        alone = one_by_one and step == 0
        scores.append(state.step(words[:: BEAM if alone else 1, step])[0].unsqueeze(1))
        if order is not None:
            state.reorder(order // BEAM if alone else order)
            words = words[order]
    return scores
