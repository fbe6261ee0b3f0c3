"""``--optimizer muon``: its steps against loops and against torch, who gets it, precisions, states, bad options."""

import copy

import pytest
import torch
from fairseq import optim
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.adam import FusedAdam
from fairseq_deep.plugin.training.fp16 import FP16Optimizer
from fairseq_deep.plugin.training.muon import SCALES, Muon, is_matrix, orthogonalise, scale_of
from fairseq_deep.plugin.training.optimizer import MuonConfig
from tests.helpers.flags import one_line, parse
from tests.helpers.methods import METHODS, OPTIONS, depths
from tests.reference import naive_muon

SHAPES = [(3, 5), (5, 3), (4, 4), (3, 5), (4,), (6, 2)]  # the last two belong to Adam
MATRICES = 4
OPTIONS_OF = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-3}


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float64, marked=range(MATRICES)):
    weights = [torch.nn.Parameter(tensor) for tensor in tensors(0, dtype)]
    for index in marked:
        weights[index].hidden_matrix = True
    return weights


def train(optimizer, weights, count, start=0, scale=1.0):
    for step in range(start, start + count):
        for weight, grad in zip(weights, tensors(100 + step)):
            weight.grad = (grad * float(scale)).to(weight.dtype)
        optimizer.step(scale=scale)
    return weights


@pytest.mark.parametrize("scale, ns_steps, momentum", [(SCALES[0], 5, 0.95), (SCALES[1], 5, 0.95), (SCALES[0], 1, 0)])
def test_steps_are_those_of_the_equations(scale, ns_steps, momentum):
    weights, adam = parameters(), parameters()
    train(Muon(weights, momentum=momentum, ns_steps=ns_steps, scale=scale, **OPTIONS_OF), weights, 4)
    train(FusedAdam(adam, **OPTIONS_OF), adam, 4)
    grads = [tensors(100 + step) for step in range(4)]
    settings = {"lr": 0.1, "decay": 0.1, "momentum": momentum, "ns_steps": ns_steps, "scale": scale}
    for index, start in enumerate(tensors(0)[:MATRICES]):
        expected = naive_muon.steps(start.tolist(), [grad[index].tolist() for grad in grads], **settings)
        torch.testing.assert_close(weights[index].tolist(), expected, rtol=1e-9, atol=1e-9)
    for mine, other in zip(weights[MATRICES:], adam[MATRICES:]):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("ours, theirs", [("match_rms_adamw", "match_rms_adamw"), ("jordan", "original")])
def test_steps_are_those_of_torch(ours, theirs):
    """torch iterates in bf16, so does this model in bf16; weights are in fp32 in both."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    mine, other = parameters(torch.float32)[:MATRICES], parameters(torch.float32)[:MATRICES]
    train(Muon(mine, scale=ours, **OPTIONS_OF), mine, 4)
    reference = torch.optim.Muon(other, lr=0.1, weight_decay=0.1, adjust_lr_fn=theirs)
    for step in range(4):
        for weight, grad in zip(other, tensors(100 + step)):
            weight.grad = grad.float()
        reference.step()
    for one, two, start in zip(mine, other, tensors(0, torch.float32)):
        torch.testing.assert_close(one, two, rtol=0, atol=0.01)
        assert (one - start).abs().max() > 0.1


@pytest.mark.parametrize("shape, jordan, rms", [((128, 512), 1, 4.525), ((512, 128), 2, 4.525), ((128, 128), 1, 2.263)])
def test_scales(shape, jordan, rms):
    assert scale_of(shape, "jordan") == jordan
    assert scale_of(shape, "match_rms_adamw") == pytest.approx(rms, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64)])
def test_five_steps_move_singular_values_into_the_band(shape, dtype):
    """The quintic maps [0.01, 1] into [0.68, 1.13] (its own minimum and maximum on a grid); bf16 adds rounding."""
    grid = torch.linspace(0.01, 1, 10001, dtype=torch.float64)
    for _ in range(5):
        grid = 3.4445 * grid - 4.775 * grid**3 + 2.0315 * grid**5
    low, high = float(grid.min()), float(grid.max())
    assert 0.68 < low < 0.69 and 1.13 < high < 1.14
    left, _ = torch.linalg.qr(torch.randn(2, shape[0], min(shape), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(2, shape[1], min(shape), dtype=torch.float64))
    values = torch.linspace(0.1, 1, min(shape), dtype=torch.float64)  # over the norm: 0.016 at least
    found = orthogonalise(((left * values) @ right.transpose(1, 2)).to(dtype), 5)
    assert found.dtype == dtype and found.shape[1:] == shape
    slack = 0.02 if dtype == torch.bfloat16 else 1e-4
    sizes = torch.linalg.svdvals(found.double())
    assert sizes.min() > low - slack and sizes.max() < high + slack
    # and it keeps the singular vectors: U^T X V is diagonal
    inner = left.transpose(1, 2) @ found.double() @ right
    assert (inner - torch.diag_embed(torch.diagonal(inner, dim1=1, dim2=2))).abs().max() < 5 * slack


def test_the_zero_gradient_moves_nothing():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.hidden_matrix, weight.grad = True, torch.zeros(3, 2)
    Muon([weight], lr=0.1).step()
    assert torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize("scale", [128.0, torch.tensor(128.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_divided_by_the_scale(dtype, scale):
    plain, scaled = parameters(dtype), parameters(dtype)
    train(Muon(plain, **OPTIONS_OF), plain, 3)
    optimizer = Muon(scaled, **OPTIONS_OF)
    train(optimizer, scaled, 3, scale=scale)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for one, two, grad in zip(plain, scaled, tensors(102)):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(two.grad, grad.to(dtype), rtol=tolerance, atol=tolerance)
    assert {optimizer.state[weight]["momentum_buffer"].dtype for weight in scaled[:MATRICES]} == {torch.float32}


def test_a_matrix_has_the_rate_of_its_layer():
    """CompleteP's factors; eps is Adam's only."""
    mixed = parameters()
    for index in (0, 4):
        mixed[index].param_group = (0.5, 0.25)
    train(Muon(mixed, **OPTIONS_OF), mixed, 3)
    plain, own = parameters(), parameters()
    train(Muon(plain, **OPTIONS_OF), plain, 3)
    train(Muon(own, **{**OPTIONS_OF, "lr": 0.05, "eps": 0.25e-3}), own, 3)
    for index, weight in enumerate(mixed):
        expected, other = (own, plain) if index in (0, 4) else (plain, own)
        torch.testing.assert_close(weight, expected[index], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(weight, other[index])


# of each model with a matrix inside of layers that is not one of attention or feed-forward, and some others
RULED = ["residual-highway", "residual-sdu", "residual-layerscale", "layer_agg-lstm", "layer_agg-linear",
         "layer_agg-dlcl", "decoder_attn-average", "deep_init-admin", "decoder_memory-msc"]  # fmt: skip
NAMES = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "gate"}


@pytest.mark.parametrize("case", [*RULED, "prenorm relative_positions=2 relative_values=True"])
def test_matrices_of_attention_and_feed_forward_have_muon(case, build):
    name, flags = {**METHODS, **OPTIONS}[case]
    model = build(name, **{**flags, **depths(name, flags)})
    found = {key for key, weight in model.named_parameters() if is_matrix(weight)}
    expected = set()
    for key, weight in model.named_parameters():
        parts = key.split(".")
        if parts[1] == "layers" and parts[-1] == "weight" and parts[-2] in NAMES:
            assert weight.dim() == 2 and parts[0] in ("encoder", "decoder")
            expected.add(key)
    assert found == expected and found
    assert not any(word in key for key in found for word in ("embed", "norm", "history", "output_projection"))


def config(precision, flatten=False, **options):
    common = dict(fp16_init_scale=128, fp16_scale_window=None, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    common.update(min_loss_scale=1e-4, bf16=precision == "bf16", fp16=precision == "fp16", tpu=False)
    adam = dict(adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.01, tpu=False, lr=[0.01])
    return OmegaConf.create({
        "common": {**common, "model_parallel_size": 1, "fp16_no_flatten_grads": not flatten},
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1], "lr": [0.01]},
        "optimizer": {"_name": "muon", **adam, **options},
    })  # fmt: skip


FORMS = {
    "fp16_memory": (torch.float16, optim.MemoryEfficientFP16Optimizer, False),
    "bf16": (torch.bfloat16, FP16Optimizer, False),
    "fp16": (torch.float16, FP16Optimizer, False),
    "fp16_flat": (torch.float16, FP16Optimizer, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_wrappers_of_half_precision_make_the_steps_of_fp32(form):
    """With a loss scale, clipping and, where fairseq would flatten, copies that stay apart."""
    dtype, wrapper, flatten = FORMS[form]
    weights, exact = parameters(dtype), parameters(torch.float32)
    cfg = config("bf16" if dtype == torch.bfloat16 else "fp16", flatten, lr=[0.1])
    half = wrapper.build_optimizer(cfg, weights)
    whole = optim.build_optimizer(config("fp32", lr=[0.1])["optimizer"], exact)
    assert cfg.common.fp16_no_flatten_grads != flatten and not half.has_flat_params
    assert sum(map(is_matrix, half.optimizer.param_groups[0]["params"])) == MATRICES
    for step in range(3):
        norms = []
        for optimizer, params in ((half, weights), (whole, exact)):
            optimizer.zero_grad()
            optimizer.backward(sum((p.float() * g).sum() for p, g in zip(params, tensors(step, torch.float32))))
            optimizer.multiply_grads(0.5)
            norms.append(float(optimizer.clip_grad_norm(1.0)))
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=0.02) and norms[1] > 1
    for one, two, start in zip(weights, exact, tensors(0, torch.float32)):
        torch.testing.assert_close(one.float(), two, rtol=0.02, atol=0.02)
        assert (two - start).abs().max() > 0.06


@pytest.mark.parametrize("form", ["fp32", "fp16_memory"])
def test_a_state_continues_bit_for_bit(form):
    dtype, wrapper, _ = FORMS.get(form, (torch.float32, None, False))

    def build(weights):
        if wrapper is None:
            return optim.build_optimizer(config(form)["optimizer"], weights)
        return wrapper.build_optimizer(config("fp16"), weights)

    def steps(optimizer, weights, numbers):
        for step in numbers:
            optimizer.zero_grad()
            optimizer.backward(sum((p.float() * g).sum() for p, g in zip(weights, tensors(step, torch.float32))))
            optimizer.step()

    straight = parameters(dtype)
    first = build(straight)
    steps(first, straight, range(3))
    state = copy.deepcopy(first.state_dict())
    resumed = [torch.nn.Parameter(weight.detach().clone()) for weight in straight]
    for weight in resumed[:MATRICES]:
        weight.hidden_matrix = True
    second = build(resumed)
    second.load_state_dict(state)
    steps(first, straight, range(3, 6))
    steps(second, resumed, range(3, 6))
    assert all(torch.equal(one, two) for one, two in zip(straight, resumed))


@pytest.mark.parametrize("saved, loaded", [("fused_adam", "muon"), ("muon", "fused_adam")])
def test_the_state_of_another_optimizer_is_one_line(saved, loaded):
    weights = parameters(torch.float32)
    cfg = config("fp32")["optimizer"]
    cfg.use_old_adam = cfg.fp16_adam_stats = False
    built = {}
    for name in (saved, loaded):
        cfg._name = name
        built[name] = optim.build_optimizer(cfg, weights)
    for weight, grad in zip(weights, tensors(1, torch.float32)):
        weight.grad = grad
    built[saved].step()
    with pytest.raises(UsageError) as error:
        built[loaded].load_state_dict(built[saved].state_dict())
    assert f"does not fit --optimizer {loaded} and the precision: add --reset-optimizer" in one_line(error)


def test_the_state_of_flattened_copies_is_one_line():
    flat = FusedAdam([torch.nn.Parameter(torch.zeros(9))])
    flat.param_groups[0]["params"][0].grad = torch.ones(9)
    flat.step()
    with pytest.raises(UsageError, match="does not fit --optimizer muon and the precision"):
        optim.build_optimizer(config("fp32")["optimizer"], parameters()).load_state_dict(flat.state_dict())


def test_a_model_without_marks_is_one_line():
    with pytest.raises(UsageError) as error:
        optim.build_optimizer(config("fp32")["optimizer"], parameters(marked=()))
    assert "--optimizer muon requires a model of this package" in one_line(error)


REFUSED = {
    "momentum": (["--muon-momentum", "1"], r"--muon-momentum must be in \[0, 1\), not 1.0: use 0.95, or omit it"),
    "negative": (["--muon-momentum", "-0.1"], r"--muon-momentum must be in \[0, 1\), not -0.1"),
    "nan": (["--muon-momentum", "nan"], r"--muon-momentum must be in \[0, 1\), not nan"),
    "steps": (["--muon-ns-steps", "0"], "--muon-ns-steps must be at least 1, not 0: use 5, or omit it"),
    "bmuf": (["--use-bmuf"], "--use-bmuf is not supported with --optimizer muon: use --optimizer adam, or omit"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_flags_are_one_line(case):
    flags, problem = REFUSED[case]
    with pytest.raises(UsageError, match=problem):
        parse("--arch", "transformer_prenorm_2l2l_tiny", "--optimizer", "muon", *flags)


def test_an_unknown_scale_is_one_line(capsys):
    with pytest.raises(SystemExit):
        parse("--arch", "transformer_prenorm_2l2l_tiny", "--optimizer", "muon", "--muon-scale", "none")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --muon-scale: invalid choice: 'none'" in last and all(name in last for name in SCALES)
    with pytest.raises(UsageError, match="unknown --muon-scale none; choose from match_rms_adamw, jordan"):
        Muon(parameters(), scale="none")


def test_defaults_are_those_of_the_papers():
    cfg = MuonConfig()
    assert (cfg.muon_momentum, cfg.muon_ns_steps, str(cfg.muon_scale)) == (0.95, 5, "match_rms_adamw")
    weight = torch.nn.Parameter(torch.zeros(256, 64))
    weight.hidden_matrix, weight.grad = True, torch.randn(256, 64)
    Muon([weight], lr=1.0).step()
    # all singular values are near 1, so the entries have about Adam's root mean square, 0.2
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)


def test_completep_rates_and_fp16_on_a_cpu_are_accepted():
    """fairseq's flattened copies would exclude both."""
    flags = ["--residual", "completep", "--completep-rates", "--fp16", "--cpu", "--optimizer"]
    assert parse("--arch", "transformer_prenorm_2l2l_tiny", *flags, "muon").fp16
    with pytest.raises(UsageError, match="--completep-rates requires separate parameters"):
        parse("--arch", "transformer_prenorm_2l2l_tiny", *flags, "fused_adam")
