"""A model of plain structure is fairseq's own transformer: same keys, same outputs, checkpoints load."""

import argparse
import types

import pytest
import torch
from fairseq.models.transformer import TransformerModel, base_architecture

from tests.conftest import make_batch, tiny_flags


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
def test_weights_of_fairseqs_transformer_give_its_output(norm, build, dictionary):
    name = f"transformer_{norm}_6l"
    pre_norm = norm == "prenorm"
    args = argparse.Namespace(
        encoder_normalize_before=pre_norm, decoder_normalize_before=pre_norm, share_all_embeddings=True,
        **tiny_flags(name)
    )  # fmt: skip
    base_architecture(args)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    stock = TransformerModel.build_model(args, task).train()
    model = build(name, share_all_embeddings=True)
    model.load_state_dict(stock.state_dict())
    source, lengths, target = make_batch(dictionary)
    expected, actual = stock(source, lengths, target)[0], model(source, lengths, target)[0]
    words = target.ne(dictionary.pad())  # what stands at padding is nobody's business
    torch.testing.assert_close(actual[words], expected[words])


def test_our_encoder_layers_carry_no_dead_weights(build):
    state = build("transformer_prenorm_6l").state_dict()
    keys = {key.split(".layers.0.")[1] for key in state if "encoder.layers.0." in key}
    modules = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "self_attn_layer_norm"]
    modules += ["fc1", "fc2", "final_layer_norm"]
    assert keys == {f"{module}.{part}" for module in modules for part in ("weight", "bias")}
