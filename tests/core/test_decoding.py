"""Linear layers for decoding: what is replaced and what is not. Their products are in ``test_int8.py``."""

import types

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fairseq_deep.core.decoding import linear as layers
from fairseq_deep.core.decoding import pack_linear, reduce_precision
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.task import DeepTranslationConfig, DeepTranslationTask
from tests.helpers.tensors import case

GENERATION = OmegaConf.create({"generation": {"beam": 4, "print_alignment": None}})
TINY = "transformer_postnorm_2l2l_tiny"


def test_the_packed_copy_is_of_fp32_on_a_cpu_alone_and_gradients_pass():
    linear, x = case((3, 5, 16, 33))
    packed = layers.PackedLinear(linear)
    packed.bfloat16()
    assert packed.native is None
    with torch.no_grad():
        torch.testing.assert_close(packed(x.bfloat16()), linear(x.bfloat16()))
        packed.float()
        assert packed.native is not None
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)
    packed(x.requires_grad_()).sum().backward()
    assert x.grad is not None and linear.weight.grad is not None


def linears(module, kind):
    return [name for name, child in module.named_modules() if type(child) is kind]


@pytest.mark.parametrize("name", [TINY, "transformer_dlcl_2l2l_tiny"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_inference_packs_all_matrices_and_each_stack_takes_a_precision(name, precision, build, batch, monkeypatch):
    monkeypatch.setattr(layers, "has_bfloat", lambda: True)  # also where products in bf16 are slow
    model = build(name, share_all_embeddings=True).eval()
    expected, table = model(*batch)[0], model.encoder.embed_tokens.weight.clone()
    model.prepare_for_inference_(GENERATION)
    torch.testing.assert_close(model(*batch)[0], expected, rtol=1e-4, atol=1e-5)
    kind = {"bf16": layers.BfloatLinear, "int8": layers.Int8Linear}[precision]
    for stack, count in ((model.decoder, 2 * 8 + 1), (model.encoder, 2 * 4)):  # queries, keys and values are one
        assert not linears(stack, kind)
        assert reduce_precision(stack, precision) == len(linears(stack, kind)) == count
        left = linears(stack, nn.Linear) + linears(stack, layers.PackedLinear)
        idle = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", ".linear")
        assert [name for name in left if not name.endswith(idle)] == []
        assert torch.equal(model.encoder.embed_tokens.weight, table)
        actual = model(*batch)[0]
        assert not torch.equal(actual, expected)
        assert float((actual - expected).abs().mean()) < 0.1 * float(expected.std())
    assert "output_projection" in linears(model.decoder, kind)


def test_fp32_and_other_types_are_left_alone(build):
    model = build(TINY)
    assert reduce_precision(model.decoder, "fp32") == 0
    model.half()
    assert pack_linear(model) == 0 and not linears(model, layers.PackedLinear)


@pytest.fixture
def generator(dictionary):
    """generator(model, **settings): what the task with these settings does with a model that is to translate."""

    def build(model, **settings):
        task = DeepTranslationTask(DeepTranslationConfig(**settings), dictionary, dictionary)
        task.build_generator([model], types.SimpleNamespace())

    return build


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_model_in_half_precision_is_refused(precision, build, generator):
    model = build(TINY).half()
    model.prepare_for_inference_(GENERATION)
    with pytest.raises(UsageError, match=f"{precision} requires a CPU and a model in fp32: add --cpu"):
        generator(model, decode_precision=precision)


def test_a_model_that_is_about_to_be_trained_stays_as_it_is(build, generator):
    """fairseq builds a generator of it for ``--eval-bleu``."""
    model = build(TINY)
    count = len(linears(model.decoder, nn.Linear))
    generator(model, decode_precision="int8")
    generator(model, decode_compile=True)
    assert len(linears(model.decoder, nn.Linear)) == count > 10 and model.decoder.compiled is None
    model.prepare_for_inference_(GENERATION)
    with pytest.raises(UsageError, match="is not supported with --decode-precision int8: omit one of the two"):
        generator(model, decode_precision="int8", decode_compile=True)
    generator(model, decode_precision="int8")
    assert linears(model.decoder, layers.Int8Linear)
    with pytest.raises(UsageError, match="in --decode-precision int8 already: reload the model"):
        generator(model, decode_precision="bf16")


def test_the_task_compiles_models_that_are_about_to_translate(build, generator):
    model = build(TINY)
    model.prepare_for_inference_(GENERATION)
    generator(model, decode_compile=True)
    assert model.decoder.compiled is not None
    stock = types.SimpleNamespace(_is_generation_fast=True, decoder=types.SimpleNamespace())
    with pytest.raises(UsageError, match="--decode-compile requires models of this package"):
        DeepTranslationTask(DeepTranslationConfig(decode_compile=True), None, None)._compile(stock)


def in_steps(model, batch):
    source, lengths, target = batch
    memory, state = model.encoder(source, lengths), {}
    steps = range(1, target.size(1) + 1)
    return torch.cat([model.decoder(target[:, :t], encoder_out=memory, incremental_state=state)[0] for t in steps], 1)


def test_a_prepared_model_runs_under_autocast(build, batch):
    model = build(TINY).eval()
    model.prepare_for_inference_(GENERATION)
    with torch.no_grad():
        expected = in_steps(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = in_steps(model, batch).float()
    assert float((actual - expected).abs().max()) < 0.1 * float(expected.std())


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("flags", [
    {"encoder_ffn_embed_dim": 0, "activation_fn": "gelu"}, {"decoder_ffn_embed_dim": 0, "qk_norm": True},
    {"encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0, "layer_agg": "residual-dual"},
], ids=["encoder", "decoder", "both"])  # fmt: skip
def test_a_feed_forward_sublayer_of_width_0_is_not_packed(flags, precision, build, batch):
    norm = "postnorm" if "layer_agg" in flags else "prenorm"
    model = build(f"transformer_{norm}_2l2l_tiny", **flags).eval()
    with torch.no_grad():
        expected = model(*batch)[0]
        model.prepare_for_inference_(GENERATION)
        if precision == "int8":
            reduce_precision(model.decoder, "int8")
            reduce_precision(model.encoder, "int8")
        tolerance = 1e-4 if precision == "fp32" else 0.1 * expected.abs().max().item()
        torch.testing.assert_close(model(*batch)[0], expected, rtol=1e-4, atol=tolerance)


def test_matrices_of_another_kind_are_not_joined(build, batch):
    """Matrices under ``--quant-noise-scalar`` quantise themselves."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(TINY).eval()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attn.v_proj.__class__ = Doubled
    with torch.no_grad():
        expected = in_steps(model, batch)
        model.prepare_for_inference_(GENERATION)
        torch.testing.assert_close(in_steps(model, batch), expected, rtol=1e-4, atol=1e-5)


def test_whole_sentences_have_attention_weights_whatever_generation_wants(build, batch):
    """fairseq's scorer adds up the weights of an ensemble."""
    model = build(TINY).eval()
    model.prepare_for_inference_(GENERATION)
    source, lengths, target = batch
    memory = model.encoder(source, lengths)
    assert model.decoder(target, encoder_out=memory)[1]["attn"][0] is not None
    assert model.decoder(target, encoder_out=memory, incremental_state={})[1]["attn"][0] is None
