"""--encoder-attn luna and --decoder-attn luna with other flags: refusals, and what trains and decodes together."""

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from tests.helpers.flags import one_line
from tests.helpers.models import POSTNORM, PRENORM, make_batch

ENCODER, FULL = {"encoder_attn": "luna"}, {"encoder_attn": "luna", "decoder_attn": "luna"}


@pytest.mark.parametrize(
    "flags, problem, cure",
    [
        ({"decoder_attn": "luna"}, "continues the encoder's packed sequence", "add --encoder-attn luna"),
        ({"encoder_attn": "lunar"}, "unknown --encoder-attn lunar (did you mean luna?)", "choose from luna, self"),
        ({"luna_length": 8}, "--luna-length has no effect without", "omit it"),
        ({**ENCODER, "luna_length": 0}, "--luna-length 0 must be at least 1", "change or omit it"),
        ({**ENCODER, "layer_agg": "residual-dual"}, "--layer-agg residual-dual replaces", "--encoder-attn self"),
        ({**ENCODER, "decoder_memory": "layerwise"}, "--decoder-memory layerwise is not supported", "omit one"),
        ({**ENCODER, "relative_positions": 4}, "--relative-positions is not supported with --encoder", "omit one"),
        ({**ENCODER, "rotary_positions": True}, "--rotary-positions is not supported with --encoder-attn", "omit one"),
        ({**ENCODER, "qk_norm": True}, "--qk-norm is not supported with --encoder-attn luna", "omit one"),
        ({**ENCODER, "encoder_layers_to_keep": "0"}, "--encoder-layers-to-keep is not supported with", "omit one"),
        ({**ENCODER, "deep_init": "deepnet"}, "--deep-init deepnet has no rule", "use xavier"),
        ({**ENCODER, "deep_init": "tfixup"}, "--deep-init tfixup has no rule", "use xavier"),
        ({**FULL, "decoder_deep_init": "admin"}, "--deep-init admin has no rule", "use xavier"),
        ({**FULL, "decoder_kv_heads": 1}, "--decoder-kv-heads is not supported with --decoder-attn luna", "omit one"),
        ({**FULL, "decoder_layerdrop": 0.1}, "--decoder-layerdrop is not supported with", "omit one"),
        ({**FULL, "no_cross_attention": True}, "--no-cross-attention is not supported", "omit one"),
        ({**FULL, "decoder_embed_dim": 8}, "one packed sequence for both sides", "make --encoder-embed-dim"),
        ({**FULL, "alignment_layer": 0}, "--alignment-layer is not supported with --decoder-attn luna", "omit one"),
        ({**FULL, "encoder_layers": 0}, "requires layers in both stacks", "--encoder-layers 1 or more"),
    ],
    ids=str,
)
def test_what_clashes_is_refused_in_one_line(flags, problem, cure, build):
    with pytest.raises(UsageError) as error:
        build(POSTNORM, **flags)
    assert problem in one_line(error) and cure in one_line(error)


LSTM = {"decoder_layer_agg": "lstm", "decoder_ffn_embed_dim": None}


@pytest.mark.parametrize(
    "name, flags",
    [
        (POSTNORM, {**FULL, "share_all_embeddings": True, "layernorm_embedding": True}),
        (PRENORM, {**FULL, "attention_gate": "heads", "sub_norm": True, "norm": "rms"}),
        (PRENORM, {**FULL, "no_scale_embedding": True, "encoder_learned_pos": True, "encoder_layerdrop": 0.5}),
        (POSTNORM, {**FULL, "encoder_layer_agg": "dlcl", **LSTM}),
        (PRENORM, {**FULL, "decoder_layer_agg": "residual-dual"}),
        (POSTNORM, {**ENCODER, "decoder_attn": "ssru", "residual": "sdu"}),
        (PRENORM, {**FULL, "layer_agg": "ode", "ode_method": "rk2"}),
        (PRENORM, {**ENCODER, "encoder_layers": 0}),
    ],
    ids=str,
)
def test_what_goes_together_trains_and_decodes(name, flags, build, dictionary):
    model = build(name, **{"luna_length": 4, **flags}).double().train()
    randomise_a_little(model)
    source, lengths, target = make_batch(dictionary, target_lengths=(5, 5, 5))
    output = model(source, lengths, target)[0]
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()) or "layerdrop" in str(flags)
    with torch.no_grad():
        encoded, state = model.eval().encoder(source, lengths), {}
        full = model.decoder(target, encoder_out=encoded)[0]
        for step in range(1, 6):
            last = model.decoder(target[:, :step], encoder_out=encoded, incremental_state=state)[0]
            torch.testing.assert_close(last[:, -1], full[:, step - 1], rtol=1e-5, atol=1e-6)


def randomise_a_little(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
