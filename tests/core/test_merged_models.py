"""Models with every --decoder-attn: counts, presets, dropout, precision, TorchScript, recomputation, checkpoints."""

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.diagnostics import sublayer_ratios
from fairseq_deep.core.layers import DecoderContext
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES, count_parameters
from tests.helpers import invariances
from tests.helpers.decoder_attention import KINDS, STACKS, every_combination, is_parallel, make_layer
from tests.helpers.flags import parse
from tests.helpers.models import full_size, size_of
from tests.helpers.tensors import tensors_on_modules

MATT = sorted(name for name, row in ARCHITECTURES.items() if dict(row.options).get("decoder_attn") == "merged")

# exact counts at the paper's vocabularies, of 55,022 entries together: rows matt_* of the project's table of counts.
# The paper's code has an embedding bias of C numbers, which fairseq has not. A W_v of its own would give 67,575,808,
# and a W_o, too, 69,151,744.
PARAMETERS = {
    "transformer_matt_6l": 66000384 - 512,
    "transformer_ds_matt_6l": 66000384 - 512,
    "transformer_ds_matt_12l12l": 103828992 - 512,
    "transformer_ds_matt_18l18l": 141657600 - 512,
    "transformer_ds_matt_20l20l": 154267136 - 512,
    "transformer_ds_matt_30l30l": 217314816 - 512,
    "transformer_ds_matt_12l12l_big": 358652928 - 1024,
    "transformer_ds_matt_20l20l_big": 560192512 - 1024,
}
# the same for 6 layers with another --decoder-attn
ABLATIONS = {
    "self": 72310272 - 512,
    "average": 72304128 - 512,
    "average-ffn": 84902400 - 512,
    "merged": 66000384 - 512,
    "merged-self": 72304128 - 512,
    "merged-average": 72297984 - 512,
    "merged-average-ffn": 84896256 - 512,
    "ssru": 72310272 - 512 - 6 * ((4 * 512**2 + 4 * 512) - (2 * 512**2 + 512)),
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_count_is_the_papers(name):
    assert count_parameters(name) == PARAMETERS[name]


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_count_of_the_ablations(kind):
    flags = {"decoder_attn": "self", **KINDS[kind]}
    assert size_of(full_size("transformer_matt_6l", 55022, share_all_embeddings=True, **flags)) == ABLATIONS[kind]


def test_separate_vocabularies_have_the_same_sum():
    """As in the recipes: the target's embedding is the output projection, the source has its own."""
    model = full_size("transformer_matt_6l", 27511, share_decoder_input_output_embed=True)
    assert size_of(model) == PARAMETERS["transformer_matt_6l"]


@pytest.mark.parametrize("name", MATT)
def test_merging_saves_four_matrices_a_layer(name):
    """And their biases, and a norm: 4 C^2 + 6 C."""
    merged, plain = (size_of(full_size(name, 100, **flags)) for flags in ({}, {"decoder_attn": "self"}))
    row = ARCHITECTURES[name]
    dim = {"base": 512, "big": 1024, "iwslt": 512}[row.size]
    assert plain - merged == row.decoder_layers * (4 * dim**2 + 6 * dim)


@pytest.mark.parametrize(
    "name, depth, dropout, attention_dropout, width, bleu",
    [
        ("transformer_matt_6l", 6, 0.1, 0.1, 512, "27.49"),
        ("transformer_ds_matt_6l", 6, 0.1, 0.1, 512, "27.35"),
        ("transformer_ds_matt_12l12l", 12, 0.3, 0.2, 512, "28.55"),
        ("transformer_ds_matt_18l18l", 18, 0.3, 0.2, 512, None),
        ("transformer_ds_matt_20l20l", 20, 0.3, 0.2, 512, "28.67"),
        ("transformer_ds_matt_30l30l", 30, 0.3, 0.2, 512, None),
        ("transformer_ds_matt_12l12l_big", 12, 0.3, None, 1024, "29.47"),
        ("transformer_ds_matt_20l20l_big", 20, 0.3, None, 1024, "29.62"),
        ("transformer_ds_matt_12l12l_iwslt", 12, 0.5, 0.3, 512, None),
    ],
)
def test_presets_are_the_published_ones(name, depth, dropout, attention_dropout, width, bleu):
    args = parse("--arch", name)
    assert (args.encoder_layers, args.decoder_layers) == (depth, depth)
    assert args.dropout == dropout
    assert attention_dropout is None or args.attention_dropout == attention_dropout
    assert (args.encoder_embed_dim, args.decoder_embed_dim) == (width, width)
    assert (args.decoder_attn, args.layer_agg) == ("merged", "residual")
    assert getattr(args, "deep_init", None) == ("ds" if "_ds_" in name else "xavier")
    assert not args.encoder_normalize_before and not args.decoder_normalize_before
    assert ARCHITECTURES[name].bleu == bleu


@pytest.mark.parametrize("name", MATT)
def test_a_flag_beats_the_preset(name):
    assert parse("--arch", name).decoder_attn == "merged"
    assert getattr(parse("--arch", name, "--layer-agg", "lstm"), "deep_init", None) in (None, "xavier")
    assert parse("--arch", name, "--decoder-attn", "average").decoder_attn == "average"
    assert parse("--arch", name, "--layer-agg", "dlcl").decoder_attn == "merged", "another axis"


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_once_on_each_sublayer(kind):
    """And within attention, on weights alone: where all of them are dropped, the mean is left."""
    layer = make_layer(kind, dropout=0.5).float().train()
    seen, x, memory = [], torch.randn(6, 4, 16), torch.randn(5, 4, 16)
    layer.dropout_module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    layer(x, DecoderContext(memory, mask=torch.zeros(6, 6)))
    assert len(seen) == (2 if is_parallel(kind) else 3)
    for whole, dropped in seen:
        alive = whole != 0  # after a ReLU, some are not
        kept = dropped[alive] != 0
        assert alive.float().mean() > 0.3 and 0.3 < kept.float().mean() < 0.7
        torch.testing.assert_close(dropped[alive][kept], 2 * whole[alive][kept])


@pytest.mark.parametrize("kind", ["merged", "merged-self", "merged-average"])
def test_dropout_in_a_depthwise_lstm(kind, build):
    """On the sum of both attentions."""
    layer = build("transformer_lstm_2l2l_tiny", dropout=0.5, **KINDS[kind]).decoder.layers[0].train()
    x, memory, mask = torch.randn(6, 4, 16), torch.randn(5, 4, 16), torch.zeros(6, 6)
    dropped, whole = (layer.train(mode)(x, DecoderContext(memory, mask=mask))[0] for mode in (True, False))
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])


def test_attention_dropout_leaves_the_mean_alone():
    layer = make_layer("merged", attention_dropout=1.0).float().train()
    x, memory = torch.randn(6, 4, 16), torch.randn(5, 4, 16)
    context, attention = DecoderContext(memory, mask=torch.zeros(6, 6)), layer.encoder_attn
    output, _ = layer.attend(x, context, True)
    torch.testing.assert_close(output, attention.out_proj(layer.mean(attention.v_proj(x))), rtol=1e-4, atol=1e-4)
    whole, _ = layer.eval().attend(x, context, True)
    assert not torch.allclose(whole, output, atol=0.1)


@every_combination
def test_lower_precision_is_finite_and_near(kind, stack, build, dictionary):
    name, flags = STACKS[stack]
    invariances.lower_precision_is_finite_and_near(lambda: build(name, **flags, **KINDS[kind]), dictionary)


@every_combination
def test_bfloat16_in_steps(kind, stack, build, batch):
    """Sums are kept in fp32, also over 60 steps: outputs are those of the full forward pass, up to its rounding."""
    name, flags = STACKS[stack]
    model = build(name, **flags, **KINDS[kind]).eval().bfloat16()
    target = torch.randint(4, 40, (3, 60))
    with torch.no_grad():
        encoder_out, state = model.encoder(*batch[:2]), {}
        full = model.decoder(target, encoder_out=encoder_out)[0].float()
        for step in range(1, 61):
            last = model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)[0]
    for cache in state.values():
        assert cache.get("vector", torch.zeros(1)).dtype == torch.float32
    assert (last[:, -1].float() - full[:, -1]).abs().max() < 0.1 * full.std()


@every_combination
def test_activation_checkpointing_changes_nothing(kind, stack, build, batch):
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        name, flags = STACKS[stack]
        model = build(name, checkpoint_activations=recompute, dropout=0.1, **flags, **KINDS[kind]).train()
        calls = []
        model.decoder.layers[0].encoder_attn.q_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        output = model(*batch)[0]
        output.square().mean().backward()
        assert len(calls) == (2 if recompute else 1)
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-5)


@every_combination
def test_a_loaded_model_gives_the_same_output(kind, stack, build, batch, tmp_path):
    name, flags = STACKS[stack]
    model, other = (build(name, **flags, **KINDS[kind]).eval() for _ in range(2))
    assert not torch.equal(model(*batch)[0], other(*batch)[0])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(model(*batch)[0], other(*batch)[0])


@every_combination
def test_nothing_stays_on_the_modules(kind, stack, build, batch):
    name, flags = STACKS[stack]
    model = build(name, **flags, **KINDS[kind])
    model(*batch)[0].sum().backward()
    with torch.no_grad():
        encoder_out = model.eval().encoder(*batch[:2])
        model.decoder(batch[2][:, :1], encoder_out=encoder_out, incremental_state={})
    fairseqs = {"decoder._future_mask", "encoder.embed_positions.weights", "decoder.embed_positions.weights"}
    assert tensors_on_modules(model) <= fairseqs


def test_what_generation_makes_of_the_matrices_is_not_saved(build, batch):
    model, other = (build("transformer_postnorm_2l2l_tiny").eval() for _ in range(2))
    keys = list(model.state_dict())
    model.make_generation_fast_(need_attn=False)
    assert list(model.state_dict()) == keys
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(*batch)[0], model(*batch)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_fairseq_builds_it_from_the_checkpoint_alone(kind, dictionary, batch, tmp_path):
    line = ["--arch", "transformer_postnorm_2l2l_tiny"]
    line += ["--decoder-attn", KINDS[kind].get("decoder_attn", "self")]
    line += ["--average-ffn"] if "ffn" in kind else []
    args = parse(*line)
    task = TranslationTask(args, dictionary, dictionary)
    model = task.build_model(args).eval()
    history = [{"optimizer_name": "adam", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"args": args, "model": model.state_dict(), "optimizer_history": history, "extra_state": {}}
    torch.save(state, tmp_path / "model.pt")
    (loaded,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], task=task)
    assert torch.equal(loaded.eval()(*batch)[0], model(*batch)[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "self"])
def test_the_checkpoint_of_another_attention_is_refused(kind, build):
    model, plain = build("transformer_postnorm_2l2l_tiny", **KINDS[kind]), build("transformer_postnorm_2l2l_tiny")
    for one, other in ((model, plain), (plain, model)):
        with pytest.raises(UsageError) as error:
            one.load_state_dict(other.state_dict())
        text = str(error.value)
        assert "the checkpoint has another architecture" in text and "self_attn" in text and "\n" not in text


def test_the_diagnostics_know_the_merged_sub_layer(build, batch):
    model = build("transformer_postnorm_2l2l_tiny", decoder_attn="merged").train()
    padding = {"encoder": batch[0].eq(model.encoder.padding_idx), "decoder": batch[2].eq(model.encoder.padding_idx)}
    found = sublayer_ratios(model, padding, lambda: model(*batch)[0].square().sum())
    assert [ratios.part for ratios in found["decoder"]] == ["merged", "ffn"] * 2
    assert all(ratios.variance > 0 and ratios.beta > 0 for ratios in found["decoder"])
