"""A model of plain structure is fairseq's own transformer: keys, outputs, dropout, checkpoints.

Gradients are those of the equations: ``tests/core/test_whole_models.py``.
"""

import argparse
import copy

import pytest
import torch
import torch.nn.functional as F
from fairseq import trainer

from tests.helpers.models import PRENORM, fairseq_transformer, make_batch, tiny_flags


@pytest.fixture(params=["prenorm", "postnorm"])
def twins(request, build, dictionary):
    """twins(**flags): fairseq's own transformer, and ours with its weights."""

    def make(**flags):
        name = f"transformer_{request.param}_6l"
        flags = {**tiny_flags(name), "share_all_embeddings": True, **flags}
        theirs, ours = fairseq_transformer(dictionary, request.param, **flags), build(name, **flags)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    return make


WIDER = {"decoder_embed_dim": 24, "decoder_ffn_embed_dim": 40, "share_all_embeddings": False}


@pytest.mark.parametrize("flags", [
    {},
    {"layernorm_embedding": True},
    {"no_scale_embedding": True, "encoder_learned_pos": True, "decoder_learned_pos": True},
    {"activation_fn": "gelu", "no_token_positional_embeddings": True},
    {"no_cross_attention": True},
    WIDER,
], ids="-".join)  # fmt: skip
def test_weights_of_fairseqs_transformer_give_its_output(twins, dictionary, flags):
    """Its output for sources padded on either side, and with full context, where the decoder sees later words."""
    stock, model = (each.eval() for each in twins(**flags))
    for left_pad in (True, False):
        source, lengths, target = make_batch(dictionary, left_pad=left_pad)
        words = target.ne(dictionary.pad())  # outputs at padding mean nothing
        plain, full = [], []
        for each in (model, stock):
            plain.append(each(source, lengths, target)[0][words])
            encoded = each.encoder(source, lengths)
            full.append(each.decoder(target, encoder_out=encoded, full_context_alignment=True)[0][words])
        torch.testing.assert_close(*plain)
        torch.testing.assert_close(*full)
        assert not torch.allclose(plain[0], full[0])


def run(model, batch):
    torch.manual_seed(3)
    return model(*batch)[0]


RATES = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}
LAYERS = [f"Transformer{side}Layer{base}" for side in ("Encoder", "Decoder") for base in ("", "Base")]
RETAINED = {"in training": "train", "all": None, "attention": ["MultiheadAttention"], "layers": LAYERS,
            "none": ["Embedding"]}  # fmt: skip


@pytest.mark.parametrize("kept", RETAINED)
def test_dropout_is_where_fairseq_has_it(kept, twins, dictionary):
    """With the same seed the same units are dropped, in the same order: without padding, all of the output is equal.

    ``--retain-dropout`` keeps dropout while translating, of all modules or of those that are named.
    """
    batch, modules = make_batch(dictionary, lengths=(5, 5, 5), target_lengths=(6, 6, 6)), RETAINED[kept]
    stock, model = (each.eval() for each in twins(**RATES))
    exact = model(*batch)[0]
    for each in (stock, model):
        each.train(modules == "train")
        for name, module in each.named_modules() if modules != "train" else ():
            if hasattr(module, "make_generation_fast_") and each is not module:
                module.make_generation_fast_(name=name, retain_dropout=True, retain_dropout_modules=modules)
    torch.testing.assert_close(run(model, batch), run(stock, batch))
    assert torch.allclose(run(model, batch), exact) is (kept == "none")


def test_quantisation_noise_is_on_every_matrix(build, batch, monkeypatch):
    """In training each block of 4 weights is gone or, at the rate 1/2, twice as large; parameters do not change."""
    flags = {"quant_noise_pq": 0.5, "quant_noise_pq_block_size": 4}
    model, used, found, linear = build(PRENORM, **flags), [], {}, F.linear
    recomputed = copy.deepcopy(build(PRENORM, checkpoint_activations=True, **flags))
    recomputed.load_state_dict(model.state_dict())
    matrices = {name: module for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and (".layers." in name or "quant" in name)}  # fmt: skip
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: used.append(weight) or linear(x, weight, bias))
    for name, module in matrices.items():
        module.register_forward_hook(lambda *_, name=name: found.update({name: used[-1].detach()}))
    before = {name: module.weight.detach().clone() for name, module in matrices.items()}
    model.eval()(*batch)
    assert len(found) == len(matrices) == 2 * (6 + 10 + 1)
    assert all(torch.equal(found[name], weight) for name, weight in before.items())
    for each in (model, recomputed):
        torch.manual_seed(1)
        each.train()(*batch)[0].square().mean().backward()
    for name, weight in before.items():
        factor, grad = (found[name] / weight).view(-1, 4), matrices[name].weight.grad
        assert factor.eq(factor[:, :1]).all() and set(factor.unique().tolist()) == {0.0, 2.0}, name
        assert grad.view(-1, 4)[factor[:, 0] == 0].any() and torch.equal(matrices[name].weight, weight), name
        torch.testing.assert_close(recomputed.get_submodule(name).weight.grad, grad)


def test_hidden_states_and_attention_are_fairseqs(twins, dictionary):
    stock, model = twins()
    source, lengths, target = make_batch(dictionary)
    words = target.ne(dictionary.pad())
    encoded = [m.eval().encoder(source, lengths, return_all_hiddens=True) for m in (stock, model)]
    theirs, ours = (out["encoder_states"] for out in encoded)
    assert len(ours) == 7
    real = source.ne(dictionary.pad()).T
    for expected, actual in zip(theirs, ours):
        torch.testing.assert_close(actual[real], expected[real])
    assert not ours[0][~real].any(), "embeddings of padding are zero"
    extras = [m.decoder(target, encoder_out=out)[1] for m, out in zip((stock, model), encoded)]
    torch.testing.assert_close(extras[1]["attn"][0][words], extras[0]["attn"][0][words])
    assert len(extras[1]["inner_states"]) == 7
    for expected, actual in zip(*(extra["inner_states"] for extra in extras)):
        torch.testing.assert_close(actual[words.T], expected[words.T])


@pytest.mark.parametrize("shared", ["share_decoder_input_output_embed", "share_all_embeddings"])
def test_an_adaptive_softmax_with_shared_embeddings_loads_again(twins, shared):
    """fairseq adds an output projection to every checkpoint of shared embeddings, also where the model has none."""
    cutoff = {"adaptive_softmax_cutoff": "6,10", "share_all_embeddings": False}
    stock, model = twins(**{**cutoff, shared: True})
    model.load_state_dict(model.state_dict())
    found = stock.state_dict()
    for name, value in model.named_parameters():
        assert torch.equal(value, found[name]), name


def test_the_log_names_only_shared_parameters(build):
    """The trainer logs "detected shared parameter" for each; absent biases are none."""
    (shared,) = trainer._catalog_shared_params(build("transformer_modern_6l", share_all_embeddings=True))
    assert shared[0] == "encoder.embed_tokens.weight"


@pytest.mark.parametrize("side, kept", [("encoder", "0,2"), ("decoder", "1,4,5")])
def test_pruning_one_side_keeps_the_other(twins, build, side, kept):
    _, model = twins()
    numbers = kept.split(",")
    name = "transformer_prenorm_6l" if model.encoder.layers[0].normalize_before else "transformer_postnorm_6l"
    small = build(name, share_all_embeddings=True, **{f"{side}_layers": len(numbers)})
    chosen = argparse.Namespace(**{f"{side}_layers_to_keep": kept, "arch": name})
    small.load_state_dict(model.state_dict(), model_cfg=chosen)
    other = "decoder" if side == "encoder" else "encoder"
    assert not hasattr(chosen, f"{other}_layers_to_keep")
    pairs = [(getattr(model, side).layers[int(old)], getattr(small, side).layers[new])
             for new, old in enumerate(numbers)]  # fmt: skip
    for old, new in [*pairs, (getattr(model, other), getattr(small, other))]:
        for name, value in old.named_parameters():
            assert torch.equal(new.get_parameter(name), value), name
