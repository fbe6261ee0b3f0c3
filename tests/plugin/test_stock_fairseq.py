"""A model of plain structure is fairseq's own transformer: same keys, same outputs, checkpoints load."""

import argparse

import pytest
import torch

from tests.helpers.models import fairseq_transformer, make_batch, tiny_flags


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


def run(model, batch, **options):
    torch.manual_seed(3)
    return model.train()(*batch, **options)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"layernorm_embedding": True},
        {"no_scale_embedding": True, "encoder_learned_pos": True, "decoder_learned_pos": True},
        {"activation_fn": "gelu", "no_token_positional_embeddings": True},
    ],
    ids=lambda flags: "-".join(flags) or "plain",
)
def test_weights_of_fairseqs_transformer_give_its_output(twins, dictionary, flags):
    stock, model = twins(**flags)
    batch = make_batch(dictionary)
    words = batch[2].ne(dictionary.pad())  # what stands at padding is nobody's business
    torch.testing.assert_close(run(model, batch)[0][words], run(stock, batch)[0][words])


def test_dropout_is_where_fairseq_has_it(twins, dictionary):
    """With the same seed the same units are dropped, in the same order: without padding, all of the output is equal."""
    stock, model = twins(dropout=0.2, attention_dropout=0.3, activation_dropout=0.1)
    batch = make_batch(dictionary, lengths=(5, 5, 5), target_lengths=(6, 6, 6))
    assert not torch.equal(run(model, batch)[0], model.eval()(*batch)[0])
    torch.testing.assert_close(run(model, batch)[0], run(stock, batch)[0])


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


def test_full_context_alignment_sees_later_words(twins, dictionary):
    stock, model = twins()
    source, lengths, target = make_batch(dictionary)
    words = target.ne(dictionary.pad())
    outputs = []
    for m in (stock.eval(), model.eval()):
        outputs.append(m.decoder(target, encoder_out=m.encoder(source, lengths), full_context_alignment=True)[0])
    torch.testing.assert_close(outputs[1][words], outputs[0][words])
    assert not torch.allclose(outputs[1][words], model(source, lengths, target)[0][words])


def test_our_encoder_layers_carry_no_dead_weights(build):
    state = build("transformer_prenorm_6l").state_dict()
    keys = {key.split(".layers.0.")[1] for key in state if "encoder.layers.0." in key}
    modules = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "self_attn_layer_norm"]
    modules += ["fc1", "fc2", "final_layer_norm"]
    assert keys == {f"{module}.{part}" for module in modules for part in ("weight", "bias")}


@pytest.mark.parametrize("shared", ["share_decoder_input_output_embed", "share_all_embeddings"])
def test_an_adaptive_softmax_with_shared_embeddings_loads_again(twins, shared):
    """fairseq adds an output projection to every checkpoint of shared embeddings, also where the model has none."""
    cutoff = {"adaptive_softmax_cutoff": "6,10", "share_all_embeddings": False}
    stock, model = twins(**{**cutoff, shared: True})
    model.load_state_dict(model.state_dict())
    found = stock.state_dict()
    for name, value in model.named_parameters():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("side, kept", [("encoder", "0,2"), ("decoder", "1,4,5")])
def test_pruning_one_side_keeps_the_other(twins, build, side, kept):
    _, model = twins()
    numbers = kept.split(",")
    name = "transformer_prenorm_6l" if model.encoder.layers[0].normalize_before else "transformer_postnorm_6l"
    small = build(name, share_all_embeddings=True, **{f"{side}_layers": len(numbers)})
    chosen = argparse.Namespace(**{f"{side}_layers_to_keep": kept, "arch": name})
    small.load_state_dict(model.state_dict(), model_cfg=chosen)
    assert not hasattr(chosen, "decoder_layers_to_keep" if side == "encoder" else "encoder_layers_to_keep")
    other = "decoder" if side == "encoder" else "encoder"
    pairs = [(int(old), new) for new, old in enumerate(numbers)]
    for old, new in pairs:
        for name, value in getattr(model, side).layers[old].named_parameters():
            assert torch.equal(getattr(small, side).layers[new].get_parameter(name), value)
    for name, value in getattr(model, other).named_parameters():
        assert torch.equal(getattr(small, other).get_parameter(name), value)
