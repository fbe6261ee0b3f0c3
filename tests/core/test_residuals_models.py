"""Whole models with each residual connection (--residual): limits, counts, diagnostics, what is refused."""

import logging
import math

import pytest
import torch

from fairseq_deep.core.diagnostics import sublayer_ratios
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.residuals.layerscale import LayerScale
from fairseq_deep.core.residuals.sdu import Sdu
from tests.helpers.equations import layer_functions
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import TINY, full_size, make_batch, size_of
from tests.helpers.residuals import PLACED, B, C, T, describe, every_placed_form, flags_of, make, scores
from tests.helpers.tensors import shake


@every_placed_form
@pytest.mark.parametrize("check", INVARIANCES)
def test_whole_models_keep_what_must_hold(form, norm, check, build, dictionary):
    """With stacks of different depths, so that none can take the other's place."""

    def model(**flags):
        depths = {"encoder_layers": 3, "decoder_layers": 2}
        return build(TINY[norm], **{**depths, **flags_of(form), **flags})

    INVARIANCES[check](model, dictionary)


PLAIN = {
    "SDU with W_2 = 0 and b_2 = 0": ("sdu", {}, lambda model: set_half(model, 1, 0.0)),
    "tanh SDU with W_1 = 0 and b_1 = 0": ("sdu", {"sdu_activation": "tanh"}, lambda model: set_half(model, 0, 0.0)),
    "highway with g = 0": ("highway", {}, lambda model: set_half(model, 0, -1e4)),
    "gated attention with g = 0": ("highway", {"highway_form": "attention"}, lambda model: set_half(model, 0, -1e4)),
    "LayerScale of 1": ("layerscale", {}, lambda model: set_factors(model, 1.0)),
    "BranchNorm from update T on": ("branchnorm", {}, lambda model: model.set_num_updates(3999)),
    "ProRes from update T L on": ("prores", {"prores_period": 50}, lambda model: model.set_num_updates(99)),
}


@torch.no_grad()
def set_half(model, index, bias):
    """Matrix 0 and this *bias* for W_1 and b_1 (index 0) or W_2 and b_2 (1) of all gates."""
    for stack in (model.encoder, model.decoder):
        for linear in (linear for layer in stack.layers for linear in layer.residual.linears):
            linear.weight.chunk(2)[index].zero_()
            linear.bias.chunk(2)[index].fill_(bias)


@torch.no_grad()
def set_factors(model, value):
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.weight.fill_(value)


@pytest.mark.parametrize("case", PLAIN)
def test_the_limit_is_the_plain_model(case, build, batch):
    name, flags, go_to_limit = PLAIN[case]
    for norm in RESIDUALS.get(name).norms:
        plain = shake(build(TINY[norm])).eval()
        model = build(TINY[norm], residual=name, **flags).eval()
        missing, unexpected = torch.nn.Module.load_state_dict(model, plain.state_dict(), strict=False)
        assert all(".residual." in key for key in missing) and not unexpected
        assert not torch.allclose(scores(model, batch), scores(plain, batch), rtol=0.01)
        go_to_limit(model)
        torch.testing.assert_close(scores(model, batch), scores(plain, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "norm, flags, added",
    [
        ("pre", {"residual": "sdu"}, 78141440 - 62382080),  # printed as 78.13M, of 62.37M without
        ("pre", {"residual": "sdu", "sdu_layers": 2}, (2 * 2 + 2 * 3) * (2 * 512**2 + 2 * 512)),
        ("pre", {"encoder_residual": "sdu"}, 12 * (2 * 512**2 + 2 * 512)),
        ("post", {"residual": "highway", "highway_form": "attention"}, 30 * (2 * 512**2 + 2 * 512)),
        ("pre", {"residual": "peri"}, 30 * 2 * 512),
        ("post", {"residual": "b2t"}, 0),
        ("pre", {"residual": "layerscale"}, 30 * 512),
        ("post", {"residual": "branchnorm"}, 0),
        ("post", {"residual": "prores"}, 0),
        ("pre", {"residual": "prores", "prores_around": "completep"}, 0),
        ("pre", {"residual": "completep"}, 0),
        ("pre", {"residual": "layernorm-scaling"}, 0),
        ("pre", {"residual": "mix-ln"}, 0),
    ],
)
def test_exact_parameter_counts(norm, flags, added):
    """With the vocabulary of the papers that compare with the SDU."""
    model = full_size(f"transformer_{norm}norm_6l", 35628, share_all_embeddings=True, **flags)
    assert size_of(model) == {"pre": 62382080, "post": 62380032}[norm] + added


def test_only_the_lowest_layers_have_an_sdu(build):
    model = build(TINY["pre"], encoder_layers=4, decoder_layers=1, residual="sdu", sdu_layers=3)
    for stack, having, sublayers in ((model.encoder, 3, 2), (model.decoder, 1, 3)):
        found = [len(layer.residual.linears) for layer in stack.layers]
        assert found == [sublayers] * having + [0] * (len(stack.layers) - having)
    x, output = torch.randn(2, T, B, C)
    above = Sdu(describe(layers=4), 4, layers=3)
    assert not list(above.parameters()) and not above.matrices()
    assert torch.equal(above(x, output, 1, x), x + output)


@pytest.mark.parametrize("form", ["sdu", "highway"])
def test_initialisations_fill_both_matrices_of_every_sublayer(form, build):
    plain = make(form, "decoder")
    assert list(plain.matrices()) == [f"{role}_{index}" for index in range(3) for role in ("gate", "value")]
    for index, linear in enumerate(plain.linears):
        for role, part in (("gate", linear.weight[:C]), ("value", linear.weight[C:])):
            matrix = plain.matrices()[f"{role}_{index}"]
            assert role.isidentifier() and matrix.shape == (C, C)
            assert matrix.data_ptr() == part.data_ptr(), "the parameter itself, not a copy"
    bound = (6 / (2 * 16)) ** 0.5  # Xavier's, for 16 x 16
    model = build(TINY["pre"], residual=form, deep_init="ds", ds_init_exponent=0.5)
    for stack in (model.encoder, model.decoder):
        for number, layer in enumerate(stack.layers, 1):
            for linear in layer.residual.linears:
                for matrix in linear.weight.chunk(2):
                    assert 0.9 * bound / number**0.5 < matrix.detach().abs().max() <= bound / number**0.5 + 1e-7


@pytest.mark.parametrize("form, norm", [(form, norm) for form, norm in PLACED if " " not in form])
def test_other_aggregators_and_starts_go_with_it(form, norm, build, batch):
    """DLCL between the layers, merged attentions in them, an initialisation: all of these at once."""
    adds = RESIDUALS.get(form).running_sum
    flags = {"layer_agg": "residual" if adds else "dlcl", "deep_init": "ds", "decoder_attn": "merged"}
    if form == "layernorm-scaling":
        flags["deep_init"] = "xavier"
    model = build(TINY[norm], **flags, **flags_of(form)).train()
    output = scores(model, batch)
    output.square().mean().backward()
    assert output.isfinite().all()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
    for layer in model.decoder.layers:
        assert layer.residual.sublayers == 2


def ratio_by_hand(layer, sublayer, x, bottom, d_r):
    """|d_x| / |d_r| of an encoder's sub-layer alone, with d_r the gradient at what its connection gives."""
    x = x.detach().requires_grad_()
    norm = layer.self_attn_layer_norm if sublayer == 0 else layer.final_layer_norm
    function = layer_functions(layer, None)[sublayer]
    r = layer.residual(x, function(layer.branch_input(x, norm)), sublayer, bottom.detach())
    return float(torch.autograd.grad(r, x, d_r)[0].norm() / d_r.norm())


@pytest.mark.parametrize("form, norm", [(form, norm) for form, norm in PLACED if " " not in form])
def test_diagnostics_measure_it(form, norm, build, dictionary):
    """Var(r) and beta_RC of the encoder's sub-layers against their definitions; all of the decoder are there."""
    batch = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    model = shake(build(TINY[norm], **flags_of(form)).train(), 0.3)
    calls, hooks = [], []

    def keep(residual, inputs, r):
        r.retain_grad()
        calls.append((*inputs, r))

    for layer in model.encoder.layers:
        hooks.append(layer.residual.register_forward_hook(keep))
    scores(model, batch).square().sum().backward()
    for hook in hooks:
        hook.remove()
    padding = {"encoder": batch[0].eq(dictionary.pad()), "decoder": batch[2].eq(dictionary.pad())}
    ratios = sublayer_ratios(model, padding, lambda: scores(model, batch).square().sum())
    assert [len(ratios[side]) for side in ("encoder", "decoder")] == [len(calls), 6] == [4, 6]
    for ratio, (x, _, sublayer, bottom, r) in zip(ratios["encoder"], calls):
        layer = model.encoder.layers[ratio.layer - 1]
        assert ratio.variance == pytest.approx(float(r.detach().var(-1, unbiased=False).mean()), rel=1e-4)
        assert (ratio.beta_ln is None) == layer.normalize_before
        by_hand = ratio_by_hand(layer, sublayer, x, bottom, r.grad)
        assert ratio.beta_rc == pytest.approx(by_hand, rel=1e-3), (ratio.layer, sublayer)


@pytest.mark.parametrize(
    "norm, flags, words",
    [
        ("pre", {"residual": "sdu", "sdu_activation": "sigmod"}, "sigmod is unknown (did you mean sigmoid?)"),
        ("pre", {"residual": "sdu", "sdu_layers": 0}, "--sdu-layers 0"),
        ("pre", {"residual": "sdu", "sdu_layers": 3}, "--sdu-layers 3 exceeds the 2 layers"),
        ("pre", {"encoder_residual": "sdu", "sdu_layers": 3, "decoder_layers": 4}, "--sdu-layers 3 exceeds the 2"),
        ("pre", {"residual": "highway", "highway_form": "gates"}, "--highway-form gates is unknown (did you mean ga"),
        ("pre", {"residual": "layerscale", "layerscale_start": 0.0}, "--layerscale-start 0.0"),
        ("pre", {"residual": "layerscale", "layerscale_start": float("nan")}, "--layerscale-start must be a number"),
        ("post", {"residual": "branchnorm", "branchnorm_updates": 0}, "--branchnorm-updates 0"),
        ("pre", {"residual": "b2t"}, "--residual b2t requires post-norm"),
        ("post", {"residual": "peri"}, "--residual peri requires pre-norm"),
        ("pre", {"residual": "branchnorm"}, "--residual branchnorm requires post-norm"),
        ("post", {"residual": "sdu", "deep_init": "admin"}, "use --residual plain"),
        ("post", {"residual": "sdu", "deep_init": "admin", "admin_start": "profile"}, "use --residual plain"),
        ("post", {"residual": "layerscale", "deep_init": "deepnet"}, "use --residual plain"),
        ("post", {"residual": "highway", "deep_init": "rezero"}, "use --residual plain"),
        ("pre", {"residual": "sdu", "layer_agg": "lstm"}, "--residual sdu requires residual connections"),
        ("pre", {"sdu_layers": 1}, "--sdu-layers has no effect without --residual sdu"),
        ("post", {"residual": "b2t", "branchnorm_updates": 7}, "--branchnorm-updates has no effect"),
        ("post", {"residual": "completep"}, "--residual completep requires pre-norm"),
        ("pre", {"residual": "completep", "completep_base": 0.0}, "--completep-base must be a positive number (0.0"),
        ("pre", {"residual": "completep", "completep_base": math.inf}, "--completep-base must be a number (inf)"),
        ("pre", {"residual": "completep", "encoder_completep_base": math.nan}, "--completep-base must be a number"),
        ("pre", {"residual": "completep", "decoder_completep_base": -1.0}, "positive number (-1.0, decoder)"),
        ("pre", {"residual": "completep", "completep_alpha": 1.1}, "--completep-alpha must be a number from 0 to 1"),
        ("pre", {"residual": "completep", "decoder_completep_alpha": 2.0}, "from 0 to 1 (2.0, decoder): omit it"),
        ("pre", {"residual": "completep", "completep_alpha": math.nan}, "--completep-alpha must be a number (nan)"),
        ("pre", {"completep_base": 2.0}, "--completep-base has no effect without --residual completep"),
        (
            "pre",
            {"decoder_residual": "completep", "encoder_completep_base": 2.0},
            "--encoder-completep-base has no effect without --encoder-residual completep: add that",
        ),
        ("pre", {"residual": "completep", "layer_agg": "dlcl"}, "completep requires layers that all add to one sum"),
        ("pre", {"encoder_residual": "completep", "encoder_layer_agg": "ode"}, "one sum (encoder: --layer-agg ode)"),
        ("pre", {"residual": "completep", "layer_agg": "lstm"}, "--residual completep requires residual connections"),
        ("pre", {"residual": "completep", "encoder_layers_to_keep": "0"}, "--residual completep counts"),
        ("pre", {"residual": "prores", "prores_period": 0}, "--prores-period must be at least 1 (0)"),
        ("pre", {"residual": "prores", "prores_around": "complete"}, "complete is unknown (did you mean completep?)"),
        ("post", {"residual": "prores", "prores_around": "completep"}, "--residual completep requires pre-norm"),
        ("pre", {"residual": "prores", "prores_around": "completep", "layer_agg": "dlcl"}, "completep requires layers"),
        ("pre", {"residual": "prores", "completep_base": 2.0}, "--completep-base has no effect"),
        ("post", {"residual": "mix-ln"}, "--residual mix-ln requires pre-norm"),
        ("pre", {"residual": "mix-ln", "mix_ln_layers": 0}, "--mix-ln-layers 0 must be at least 1"),
        ("pre", {"residual": "mix-ln", "mix_ln_layers": 3}, "--mix-ln-layers 3 exceeds the 2 layers of the en"),
        ("post", {"residual": "layernorm-scaling"}, "--residual layernorm-scaling requires pre-norm"),
        ("pre", {"residual": "layernorm-scaling", "deep_init": "ds"}, "--deep-init ds both scale layers by their"),
        (
            "pre",
            {"residual": "prores", "prores_around": "layernorm-scaling", "decoder_deep_init": "depth-scaled"},
            "--deep-init depth-scaled both scale layers by their depth (decoder)",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(norm, flags, words, build):
    if flags.get("layer_agg") == "lstm":
        flags = {**flags, "encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}
    with pytest.raises(UsageError) as error:
        build(TINY[norm], **flags)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_one_stack_may_be_deep_enough_for_the_sdu_layers(build):
    model = build(TINY["pre"], residual="sdu", sdu_layers=4, encoder_layers=4)
    assert all(len(layer.residual.linears) for stack in (model.encoder, model.decoder) for layer in stack.layers)


class TestCompleteP:
    """The factor m_L^-a on every branch of a stack, with its own base for each."""

    def factors(self, model):
        return [{layer.residual.factor for layer in stack.layers} for stack in (model.encoder, model.decoder)]

    @torch.no_grad()
    def test_a_stack_as_deep_as_its_base_is_plain_to_the_last_bit(self, build, batch):
        plain = shake(build(TINY["pre"])).eval()
        model = build(TINY["pre"], residual="completep", completep_base=2.0).eval()
        model.load_state_dict(plain.state_dict())
        assert self.factors(model) == [{1.0}, {1.0}]
        assert torch.equal(scores(model, batch), scores(plain, batch))

    def test_every_branch_and_every_gradient_has_the_factor(self, build, batch):
        """A base of 3 in 2 layers: the same as plain branches whose last matrices are 1.5 times as large."""
        plain = shake(build(TINY["pre"])).double().train()
        model = build(TINY["pre"], residual="completep", completep_base=3.0).double().train()
        ends = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
        state = {key: value / 1.5 if key.endswith(ends) else value for key, value in plain.state_dict().items()}
        model.load_state_dict(state)
        for one in (model, plain):
            scores(one, batch).square().sum().backward()
        torch.testing.assert_close(scores(model, batch), scores(plain, batch))
        for (key, have), want in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(have.grad, want.grad * (1.5 if key.endswith(ends) else 1), msg=key)

    @pytest.mark.parametrize(
        "flags, factors",
        [
            ({"residual": "completep"}, [{1 / 3}, {1 / 2}]),
            ({"residual": "completep", "completep_base": 6.0}, [{2.0}, {3.0}]),
            ({"residual": "completep", "completep_base": 6.0, "encoder_completep_base": 1.5}, [{0.5}, {3.0}]),
            ({"residual": "completep", "decoder_completep_base": 0.5}, [{1 / 3}, {0.25}]),
            ({"residual": "completep", "completep_alpha": 0.5}, [{3**-0.5}, {2**-0.5}]),
            ({"residual": "completep", "completep_alpha": 0.0}, [{1.0}, {1.0}]),
            ({"residual": "completep", "completep_alpha": 0.0, "decoder_completep_alpha": 0.5}, [{1.0}, {2**-0.5}]),
        ],
    )
    def test_each_stack_has_its_depth_and_its_base(self, flags, factors, build):
        assert self.factors(build(TINY["pre"], encoder_layers=3, decoder_layers=2, **flags)) == factors

    def test_one_stack_alone_may_have_it(self, build):
        model = build(TINY["pre"], encoder_residual="completep", encoder_layer_agg="residual", decoder_layer_agg="dlcl")
        assert {type(layer.residual).__name__ for layer in model.encoder.layers} == {"CompleteP"}
        assert {type(layer.residual).__name__ for layer in model.decoder.layers} == {"Plain"}

    def test_a_deeper_base_and_unscaled_rates_are_logged_once(self, build, caplog):
        with caplog.at_level(logging.INFO, logger="fairseq_deep.core.residuals.completep"):
            build(TINY["pre"], residual="completep", completep_base=2.0)
            assert not caplog.messages
            build(TINY["pre"], residual="completep", encoder_completep_base=6.0, completep_alpha=0.5)
        deeper = "encoder: --residual completep, base 6 is deeper than the 2 layers: branches have the factor 1.732"
        assert caplog.messages.count(deeper) == 1 and len(caplog.messages) == 3
        assert sum("add --completep-rates" in message for message in caplog.messages) == 2
