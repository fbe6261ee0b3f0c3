"""``--optimizer fused_adam`` and ``muon``: their steps, states and precisions, and whose matrices Muon has.

Adam is compared with fairseq's, Muon with the equations in loops.
"""

import copy

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import Adam
from fairseq.optim.fp16_optimizer import FP16Optimizer as StockFP16Optimizer
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.adam import FusedAdam
from fairseq_deep.plugin.training.fp16 import FP16Optimizer
from fairseq_deep.plugin.training.muon import SCALES, Muon, is_matrix, orthogonalise
from fairseq_deep.plugin.training.optimizer import MuonConfig
from tests.helpers.methods import METHODS, OPTIONS, depths
from tests.reference import naive_muon

SHAPES = [(3, 5), (5, 3), (4, 4), (7, 5), (4,), (6, 2), (3, 4, 2), (1,), ()]  # those from the fifth belong to Adam
MATRICES = 4
RATES = {"betas": (0.9, 0.98), "eps": 1e-3}  # so large that its place shows
MUON = {**RATES, "lr": 0.1, "weight_decay": 0.1}
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # fairseq asks for it without a GPU, too


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def turned(matrix):
    return matrix.t().contiguous().t()


def parameters(dtype=torch.float64, seed=0, marked=range(MATRICES), factors=()):
    """Weights of which *marked* are hidden matrices, and *factors* have half the rate and a quarter of eps."""
    weights = [torch.nn.Parameter(tensor) for tensor in tensors(seed, dtype)]
    for index in marked:
        weights[index].hidden_matrix = True
    for index in factors:
        weights[index].param_group = (0.5, 0.25)
    return weights


def train(optimizer, weights, steps, start=0, scale=None, rate=lambda step: 0.1 / (1 + step)):
    """Steps with the same random gradients for any optimizer; the fifth parameter has none at every other step."""
    for step in range(start, start + steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        for index, (weight, grad) in enumerate(zip(weights, tensors(100 + step))):
            absent = index == 4 and step % 2
            grad = (2 * (turned(grad) if index == 3 else grad) * float(scale or 1)).to(weight.dtype)
            weight.grad = None if absent else grad
        optimizer.step(**({} if scale is None else {"scale": scale}))
    return weights


def near(dtype):
    return {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}


@pytest.mark.parametrize("decay, chunk", [(0.0, 2**25), (0.1, 30)])  # a tensor of 35 elements exceeds a chunk
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_steps_of_fused_adam_are_those_of_fairseq(dtype, decay, chunk, monkeypatch):
    """Also where types are mixed, as in half precision with weights of sums in fp32, and where memory is transposed."""
    monkeypatch.setattr("fairseq_deep.plugin.training.adam.CHUNK", chunk)
    ours, theirs = ([*parameters(dtype), *parameters(torch.float32, seed=1)] for _ in range(2))
    for weights in (ours, theirs):
        weights[2].data = turned(weights[2].data)  # train() does so with the gradients of the next
    optimizer = FusedAdam(ours, weight_decay=decay, **RATES)
    train(optimizer, ours, 8)
    train(Adam(theirs, weight_decay=decay, **RATES), theirs, 8)
    torch.testing.assert_close(ours, theirs, **near(dtype))
    assert all((mine - start).abs().max() > 0.1 for mine, start in zip(ours, tensors(0, dtype)))
    kept = {torch.float64} if dtype == torch.float64 else {torch.float32}
    assert {optimizer.state[weight]["exp_avg"].dtype for weight in ours[: len(SHAPES)]} == kept


@pytest.mark.parametrize("make", [FusedAdam, Muon])
@pytest.mark.parametrize("scale", [128.0, torch.tensor(128.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_divided_by_the_scale(dtype, scale, make):
    """All of them, also where types are mixed: ``--log-depth-interval`` reads them after the step."""
    plain, scaled = ([*parameters(dtype), *parameters(torch.float32)] for _ in range(2))
    train(make(plain, **MUON), plain, 3)
    train(make(scaled, **MUON), scaled, 3, scale=scale)
    torch.testing.assert_close(scaled, plain, **near(dtype))
    torch.testing.assert_close([weight.grad for weight in scaled], [weight.grad for weight in plain], **near(dtype))


def test_a_state_of_apex_counts_steps_in_the_group():
    weights = parameters()
    optimizer = FusedAdam(weights, **RATES)
    train(optimizer, weights, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        del values["step"]
    state["param_groups"][0]["step"] = 3
    resumed = FusedAdam(weights, **RATES)
    resumed.load_state_dict(state)
    train(resumed, weights, 1, start=3)
    assert resumed.state[weights[0]]["step"] == 4


@pytest.mark.parametrize("make", [FusedAdam, Muon])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_a_parameter_with_factors_has_the_steps_of_an_optimizer_of_its_own(dtype, make):
    """CompleteP's factors on lr, and so on decoupled decay, and on eps, which is Adam's; checkpoints have one group."""
    mixed, plain, own = parameters(dtype, factors=(0, 4, 6)), parameters(dtype), parameters(dtype)
    optimizer = make(mixed, **MUON)
    train(optimizer, mixed, 6)
    train(make(plain, **MUON), plain, 6)
    train(make(own, **{**MUON, "eps": 0.25e-3}), own, 6, rate=lambda step: 0.05 / (1 + step))
    for index, weight in enumerate(mixed):
        expected, other = (own, plain) if index in (0, 4, 6) else (plain, own)
        torch.testing.assert_close(weight, expected[index], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(weight, other[index], rtol=1e-4, atol=1e-4)
    [group] = optimizer.state_dict()["param_groups"]
    assert group["eps"] == 1e-3


@pytest.mark.parametrize("scale, ns_steps, momentum", [(SCALES[0], 5, 0.95), (SCALES[1], 5, 0.95), (SCALES[0], 1, 0)])
def test_steps_of_muon_are_those_of_the_equations(scale, ns_steps, momentum):
    """And those of Adam for what is no hidden matrix."""
    weights, adam = parameters(), parameters()
    for optimizer, params in ((Muon(weights, momentum=momentum, ns_steps=ns_steps, scale=scale, **MUON), weights),
                              (FusedAdam(adam, **MUON), adam)):  # fmt: skip
        train(optimizer, params, 4, rate=lambda step: 0.1)
    settings = {"lr": 0.1, "decay": 0.1, "momentum": momentum, "ns_steps": ns_steps, "scale": scale}
    grads = [[(2 * grad).tolist() for grad in tensors(100 + step)] for step in range(4)]
    for index, start in enumerate(tensors(0)[:MATRICES]):
        expected = naive_muon.steps(start.tolist(), [grad[index] for grad in grads], **settings)
        torch.testing.assert_close(weights[index].tolist(), expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(mine, other) for mine, other in zip(weights[MATRICES:], adam[MATRICES:]))


def test_defaults_of_muon_are_those_of_the_papers():
    cfg = MuonConfig()
    assert (cfg.muon_momentum, cfg.muon_ns_steps, str(cfg.muon_scale)) == (0.95, 5, "match_rms_adamw")
    assert not orthogonalise(torch.zeros(2, 3, 4), 5).any(), "a gradient of zeros gives no NaN"


# of each model with a matrix inside of layers that is not one of attention or feed-forward, and some others
RULED = ["residual-highway", "residual-sdu", "residual-layerscale", "layer_agg-lstm", "layer_agg-linear",
         "layer_agg-dlcl", "decoder_attn-average", "deep_init-admin", "decoder_memory-msc"]  # fmt: skip
NAMES = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "gate"}


@pytest.mark.parametrize("case", [*RULED, "prenorm relative_positions=2 relative_values=True"])
def test_matrices_of_attention_and_feed_forward_have_muon(case, build):
    name, flags = {**METHODS, **OPTIONS}[case]
    model = build(name, **{**flags, **depths(name, flags)})
    weights = {key: weight.dim() for key, weight in model.named_parameters() if is_matrix(weight)}
    parts = [key.split(".") for key, _ in model.named_parameters()]
    assert {*weights} == {".".join(key) for key in parts
                          if key[1] == "layers" and key[-1] == "weight" and key[-2] in NAMES}  # fmt: skip
    assert {*weights.values()} == {2}


def config(name, precision="fp16", flatten=False, **options):
    """The parts of fairseq's configuration that its optimizers read."""
    common = {"fp16_init_scale": 128, "fp16_scale_window": None, "fp16_scale_tolerance": 0.0, "min_loss_scale": 1e-4,
              "threshold_loss_scale": None, "tpu": False, "bf16": precision == "bf16", "fp16": precision == "fp16",
              "model_parallel_size": 1, "fp16_no_flatten_grads": not flatten}  # fmt: skip
    stock = {} if name == "muon" else {"use_old_adam": False, "fp16_adam_stats": False}
    adam = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.01, "tpu": False, "lr": [0.01], **stock}
    return OmegaConf.create({
        "common": common,
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1], "lr": [0.01]},
        "optimizer": {"_name": name, **adam, **options},
    })  # fmt: skip


# type, fairseq's wrapper, whether it would flatten the copies in fp32
FORMS = {
    "fp16_memory": (torch.float16, optim.MemoryEfficientFP16Optimizer, False),
    "bf16_memory": (torch.bfloat16, optim.MemoryEfficientFP16Optimizer, False),
    "bf16": (torch.bfloat16, FP16Optimizer, False),
    "fp16": (torch.float16, FP16Optimizer, False),
    "fp16_flat": (torch.float16, FP16Optimizer, True),
}
every_form = pytest.mark.parametrize("form", FORMS)


def wrapped(form, name, weights, **options):
    """The optimizer *name* in a form of half precision or in "fp32"; "stock": fairseq's Adam, with its own copies."""
    name, stock = ("adam", True) if name == "stock" else (name, False)
    if form == "fp32":
        return optim.build_optimizer(config(name, "", **options)["optimizer"], weights)
    dtype, wrapper, flatten = FORMS[form]
    wrapper = StockFP16Optimizer if stock and wrapper is FP16Optimizer else wrapper
    cfg = config(name, "bf16" if dtype == torch.bfloat16 else "fp16", flatten, **options)
    return wrapper.build_optimizer(cfg, weights)


def weights_of(form):
    return parameters(torch.float32 if form == "fp32" else FORMS[form][0])


def update(optimizer, weights, step, clip):
    """One as fairseq's trainer does it; the norm of its gradients."""
    optimizer.zero_grad()
    optimizer.backward(sum((w.float() * g).sum() for w, g in zip(weights, tensors(100 + step, torch.float32))))
    optimizer.multiply_grads(0.5)
    norm = float(optimizer.clip_grad_norm(clip))
    optimizer.step()
    return norm


NEAR_HALF = {"rtol": 2e-2, "atol": 1e-3}


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ["fused_adam", "muon"])
@every_form
def test_half_precision_trains_as_adam_of_fairseq_and_muon_as_in_fp32(form, name, clip):
    """With a loss scale, clipping and, where fairseq would flatten, copies of Muon's matrices that stay separate."""
    muon = name == "muon"
    weights, others = weights_of(form), weights_of("fp32" if muon else form)
    half, other = wrapped(form, name, weights, lr=[0.1]), wrapped("fp32", name, others, lr=[0.1]) if muon else (
        wrapped(form, "stock", others, lr=[0.1]))  # fmt: skip
    if muon:
        assert not getattr(half, "has_flat_params", False)
        assert sum(map(is_matrix, half.optimizer.param_groups[0]["params"])) == MATRICES
    for step in range(3):
        norm = update(other, others, step, clip)
        assert update(half, weights, step, clip) == pytest.approx(norm, rel=0.02 if muon else 1e-5) and norm > 1
    near = {"rtol": 0.02, "atol": 0.02} if muon else {"rtol": 1e-2, "atol": 1e-4}
    torch.testing.assert_close([each.float() for each in weights], [each.float() for each in others], **near)
    assert all((each - start).abs().max() > 0.06 for each, start in zip(weights, tensors(0, torch.float32)))


@pytest.mark.parametrize("saved, loaded", [("adam", "fused_adam"), ("fused_adam", "adam"), ("muon", "muon")])
@pytest.mark.parametrize("form", ["fp32", *FORMS])
def test_a_resumed_run_continues_in_each_precision(form, saved, loaded):
    """The state is fp32. Muon continues bit for bit: the state has the fp32 copies of the weights."""
    straight, weights = weights_of(form), weights_of(form)
    first = wrapped(form, saved, straight)
    for step in range(3):
        update(first, straight, step, 0.0)
    with torch.no_grad():
        for one, two in zip(weights, straight):
            one.copy_(two)
    second = wrapped(form, loaded, weights)
    second.load_state_dict(copy.deepcopy(first.state_dict()), optimizer_overrides={"lr": 0.02})
    assert type(first).__name__ == type(second).__name__ and second.get_lr() == 0.02, "fairseq compares the names"
    first.set_lr(0.02)
    for step in range(3, 6):
        update(first, straight, step, 0.0)
        update(second, weights, step, 0.0)
    states = [value for state in second.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.dtype for value in states} == {torch.float32}
    near = {"rtol": 0, "atol": 0} if saved == "muon" else {"rtol": 1e-5, "atol": 1e-5} if form == "fp32" else NEAR_HALF
    torch.testing.assert_close(weights, straight, **near)
    edited, kept = weights_of(form), weights_of(form)
    third = wrapped(form, loaded, edited)
    third.load_state_dict(copy.deepcopy(first.state_dict()), optimizer_overrides={"lr": 0.0})
    update(third, edited, 6, 0.0)
    torch.testing.assert_close(edited, kept, msg="weights of an edited checkpoint were replaced by its copies")


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_weights_that_are_frozen_later_stay(form):
    weights = weights_of(form)
    optimizer = wrapped(form, "fused_adam", weights)
    update(optimizer, weights, 0, 0.0)
    weights[0].requires_grad_(False)
    before = [weight.clone() for weight in weights]
    for step in range(3):
        update(optimizer, weights, step, 0.0)
    assert torch.equal(weights[0], before[0]) and not torch.equal(weights[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_of_half_precision_do_not_overflow(dtype):
    weight = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    weight.grad = torch.full_like(weight, 6e4)
    assert float(wrapped("fp32", "fused_adam", [weight]).clip_grad_norm(0.0)) == pytest.approx(6e5, rel=0.01)


@pytest.mark.parametrize("saved, loaded", [("fused_adam", "muon"), ("muon", "fused_adam")])
def test_a_state_of_the_other_optimizer_is_one_line(saved, loaded):
    weights = weights_of("fp32")
    first = wrapped("fp32", saved, weights)
    update(first, weights, 0, 0.0)
    words = f"does not fit --optimizer {loaded} and the precision: add --reset-optimizer"
    with pytest.raises(UsageError, match=words) as error:
        wrapped("fp32", loaded, weights).load_state_dict(first.state_dict())
    assert "\n" not in str(error.value)
