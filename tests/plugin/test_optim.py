"""``--optimizer fused_adam``: steps and checkpoints of fairseq's Adam, in few launches for any number of tensors."""

import copy
import io
import types

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import Adam
from fairseq.optim.fp16_optimizer import FP16Optimizer as StockFP16Optimizer
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import adam as fused
from fairseq_deep.plugin.training.adam import FusedAdam
from fairseq_deep.plugin.training.fp16 import FP16Optimizer

SHAPES = [(7, 5), (5,), (3, 4, 2), (1,), ()]
RATES = {"betas": (0.9, 0.98), "eps": 1e-3}  # so large that its place shows


@pytest.fixture(params=["fused", "foreach"])
def kernel(request, monkeypatch):
    """Both ways to update; a GPU with torch 2 takes the first, torch 1.13 the second."""
    if request.param == "foreach":
        monkeypatch.setattr(fused, "has_fused", lambda device: False)
    elif not fused.has_fused("cpu"):
        pytest.skip("this torch has no fused Adam on a CPU")
    return request.param


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def train(optimizer, weights, steps, start=0, scale=None):
    """Steps with the same random gradients for any optimizer; the second parameter has none at every other step."""
    for step in range(start, start + steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        for index, (weight, grad) in enumerate(zip(weights, 2 * parameters(seed=100 + step))):
            weight.grad = None if index == 1 and step % 2 else grad.detach().to(weight.dtype) * (scale or 1.0)
        optimizer.step(**({} if scale is None else {"scale": scale}))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_are_those_of_fairseq(dtype, decay, kernel):
    ours, theirs = parameters(dtype), parameters(dtype)
    train(FusedAdam(ours, weight_decay=decay, **RATES), ours, 8)
    train(Adam(theirs, weight_decay=decay, **RATES), theirs, 8)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    if dtype == torch.float64 and kernel == "foreach":
        tolerance = 1e-12
    for mine, other, start in zip(ours, theirs, parameters(dtype)):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        assert (mine - start).abs().max() > 0.1


def test_types_may_be_mixed(kernel):
    """As in half precision with weights of sums in fp32."""
    ours, theirs = ([*parameters(torch.float16), *parameters(torch.float32, seed=1)] for _ in range(2))
    optimizer = FusedAdam(ours, **RATES)
    train(optimizer, ours, 3)
    train(Adam(theirs, **RATES), theirs, 3)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-3)
        assert {optimizer.state[mine][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("turned", ["weight", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_may_lie_in_memory_otherwise(dtype, turned, kernel):
    """Weights and gradients that are views of a transposed matrix."""
    turn = {turned: lambda x: x.t().contiguous().t()}
    results = []
    for optimizer in (FusedAdam, Adam):
        [matrix, *_], grads = parameters(dtype), parameters(dtype, seed=1)
        weight = torch.nn.Parameter(turn.get("weight", torch.clone)(matrix.detach()))
        weight.grad = turn.get("gradient", torch.clone)(grads[0].detach())
        optimizer([weight], lr=0.1, **RATES).step()
        results.append(weight)
    torch.testing.assert_close(*results, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_gradients_are_divided_by_the_scale(kernel):
    plain, scaled, tensor = parameters(torch.float32), parameters(torch.float32), parameters(torch.float32)
    train(FusedAdam(plain, **RATES), plain, 3)
    train(FusedAdam(scaled, **RATES), scaled, 3, scale=128.0)
    train(FusedAdam(tensor, **RATES), tensor, 3, scale=torch.tensor(128.0))
    for weight, *others in zip(plain, scaled, tensor):
        for other in others:
            torch.testing.assert_close(other, weight)


def test_all_gradients_are_divided_also_where_types_are_mixed(kernel):
    """``--log-depth-interval`` reads them after the step."""
    weights = [*parameters(torch.float16), *parameters(torch.float32)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 64.0)
    FusedAdam(weights, **RATES).step(scale=torch.tensor(128.0))
    assert all((weight.grad == 0.5).all() for weight in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_chunks_change_nothing(dtype, kernel, monkeypatch):
    whole, parts, sizes = parameters(dtype), parameters(dtype), []
    train(FusedAdam(whole, **RATES), whole, 3)
    monkeypatch.setattr(fused, "CHUNK", 30)
    chunks = fused.chunks_of
    counted = lambda weights: (sizes.append(len(part)) or part for part in chunks(weights))  # noqa: E731
    monkeypatch.setattr(fused, "chunks_of", counted)
    train(FusedAdam(parts, **RATES), parts, 3)
    assert sizes[:3] == [1, 3, 1]  # 35 elements are more than a chunk
    for one, other in zip(whole, parts):
        assert torch.equal(one, other)


@pytest.mark.parametrize("first, second", [(Adam, FusedAdam), (FusedAdam, Adam)], ids=["from_adam", "to_adam"])
def test_a_state_goes_from_one_to_the_other(first, second, kernel):
    straight, weights = parameters(), parameters()
    train(first(straight, **RATES), straight, 6)
    optimizer = first(weights, **RATES)
    train(optimizer, weights, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = second(weights, **RATES)
    resumed.load_state_dict(torch.load(file))
    train(resumed, weights, 3, start=3)
    for one, other in zip(straight, weights):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_state_of_apex_counts_steps_in_the_group(kernel):
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


def test_sparse_gradients_are_refused():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam([weight]).step()


def config(name, precision="fp16", flatten=False, **adam):
    common = dict(fp16_init_scale=128, fp16_scale_window=None, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    common.update(min_loss_scale=1e-4, bf16=precision == "bf16", fp16=precision == "fp16", tpu=False)
    options = dict(_name=name, adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.01, use_old_adam=False)
    options.update(fp16_adam_stats=False, tpu=False, lr=[0.01], **adam)
    return OmegaConf.create({
        "common": {**common, "model_parallel_size": 1, "fp16_no_flatten_grads": not flatten},
        "distributed_training": {"distributed_world_size": 1},
        "optimization": {"update_freq": [1], "lr": [0.01]},
        "optimizer": options,
    })  # fmt: skip


def half_steps(form, name, dtype, clip, flatten=False, count=4):
    """Weights and norms of *count* steps as fairseq's trainer does them in half precision."""
    weights, norms = parameters(dtype), []
    cfg = config(name, "bf16" if dtype == torch.bfloat16 else "fp16", flatten)
    optimizer = form.build_optimizer(cfg, weights)
    for step in range(count):
        optimizer.zero_grad()
        grads = parameters(seed=100 + step)
        loss = sum((weight.float() * grad.float()).sum() for weight, grad in zip(weights, grads))
        optimizer.backward(loss)
        optimizer.multiply_grads(0.5)
        norms.append(float(optimizer.clip_grad_norm(clip)))
        optimizer.step()
    return optimizer, weights, norms


FORMS = [
    (torch.float16, optim.MemoryEfficientFP16Optimizer, False),
    (torch.bfloat16, optim.MemoryEfficientFP16Optimizer, False),
    (torch.bfloat16, FP16Optimizer, False),
    (torch.float16, FP16Optimizer, False),
    (torch.float16, FP16Optimizer, True),
]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype, form, flatten", FORMS, ids=["fp16_memory", "bf16_memory", "bf16", "fp16", "fp16_flat"])
def test_half_precision_trains_as_with_adam(dtype, form, flatten, clip, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # fairseq asks for it without a GPU, too
    stock = StockFP16Optimizer if form is FP16Optimizer else form
    _, ours, our_norms = half_steps(form, "fused_adam", dtype, clip, flatten)
    _, theirs, their_norms = half_steps(stock, "adam", dtype, clip, flatten)
    assert our_norms == pytest.approx(their_norms, rel=1e-5)
    for mine, other, start in zip(ours, theirs, parameters(dtype)):
        torch.testing.assert_close(mine, other, rtol=2e-3 if dtype == torch.float16 else 1e-2, atol=1e-4)
        assert not torch.equal(mine, start)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_are_frozen_later_stay(dtype):
    optimizer, weights, _ = half_steps(FP16Optimizer, "fused_adam", dtype, 0.0, count=2)
    weights[0].requires_grad_(False)
    before = [weight.clone() for weight in weights]
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(sum(weight.float().sum() for weight in weights))
        optimizer.step()
    assert torch.equal(weights[0], before[0])
    assert not torch.equal(weights[1], before[1])


@pytest.mark.parametrize("dtype, form, flatten", FORMS, ids=["fp16_memory", "bf16_memory", "bf16", "fp16", "fp16_flat"])
def test_half_precision_resumes_the_state_of_adam(dtype, form, flatten, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    optimizer, weights, _ = half_steps(form, "adam", dtype, 0.0, flatten)
    other, others, _ = half_steps(form, "fused_adam", dtype, 0.0, flatten, count=0)
    state = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(state, optimizer_overrides={"lr": 0.5})
    assert type(optimizer).__name__ == type(other).__name__ and other.get_lr() == 0.5
    for _ in range(2):
        for weight in others:
            weight.grad = torch.ones_like(weight)
        other._needs_sync = True
        other.step()
    for values in other.optimizer.state.values():
        assert values["step"] == 6 and values["exp_avg"].dtype == torch.float32


def test_fairseq_takes_a_state_of_adam_in_fp32():
    """Its trainer compares the names of the classes."""
    built = [optim.build_optimizer(config(name)["optimizer"], parameters()) for name in ("adam", "fused_adam")]
    assert {type(optimizer).__name__ for optimizer in built} == {"FairseqAdam"}
    assert built[0].optimizer_config == built[1].optimizer_config
    assert isinstance(built[1].optimizer, FusedAdam) and not isinstance(built[0].optimizer, FusedAdam)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_clipping_and_scaling_in_fp32(clip):
    results = []
    for name in ("adam", "fused_adam"):
        weights = parameters(torch.float32)
        optimizer = optim.build_optimizer(config(name)["optimizer"], weights)
        for weight in weights[1:]:
            weight.grad = torch.ones_like(weight)
        optimizer.multiply_grads(0.25)
        optimizer.multiply_grads(torch.tensor(2.0))
        norm = optimizer.clip_grad_norm(clip, lambda norm: norm * 2)
        results.append([norm, *(weight.grad for weight in weights[1:])])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_of_half_precision_do_not_overflow(dtype):
    weight = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    weight.grad = torch.full_like(weight, 6e4)
    optimizer = optim.build_optimizer(config("fused_adam")["optimizer"], [weight])
    assert float(optimizer.clip_grad_norm(0.0)) == pytest.approx(6e5, rel=0.01)


def test_experts_are_left_to_fairseq():
    """Their gradients are clipped with the others', but not part of the norm."""
    weights = parameters(torch.float32)
    weights[0].expert = True
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = optim.build_optimizer(config("fused_adam")["optimizer"], weights)
    count = sum(weight.numel() for weight in weights[1:])
    assert float(optimizer.clip_grad_norm(1.0)) == pytest.approx(count**0.5)
    assert float(weights[0].grad[0, 0]) == pytest.approx(count**-0.5)


@pytest.mark.parametrize("flag", ["use_old_adam", "fp16_adam_stats"])
def test_flags_for_another_adam_are_refused(flag):
    with pytest.raises(UsageError, match=flag.replace("_", "-")):
        optim.OPTIMIZER_REGISTRY["fused_adam"](types.SimpleNamespace(**{flag: True}), parameters())


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would run as kernels; one on a list of tensors is one here."""

    def __init__(self):
        super().__init__()
        self.names, self.mixed = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and not any(word in str(func) for word in ("empty", "detach", "_local_scalar_dense", "profiler")):
            self.names.append(str(func))
            lists = [arg for arg in args if isinstance(arg, (list, tuple))]
            if any(len({getattr(entry, "dtype", None) for entry in entries}) > 1 for entries in lists):
                self.mixed.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "dtype, form, flatten, most",
    [(*row, most) for row, most in zip(FORMS, (13, 11, 9, 12, 13))],
    ids=["fp16_memory", "bf16_memory", "bf16", "fp16", "fp16_flat"],
)
def test_launches_do_not_grow_with_the_number_of_tensors(dtype, form, flatten, most, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    counts = {}
    stock = StockFP16Optimizer if form is FP16Optimizer else form
    for name, shape in (("adam", stock), ("fused_adam", form)):
        for size in (10, 30):
            weights = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(size)]
            cfg = config(name, "bf16" if dtype == torch.bfloat16 else "fp16", flatten)
            optimizer = shape.build_optimizer(cfg, weights)
            for _ in range(2):  # state is made in the first
                with Launches() as launches:
                    optimizer.zero_grad()
                    for weight in weights:
                        weight.grad = weight.data
                    optimizer._needs_sync = True
                    optimizer.multiply_grads(0.5)
                    optimizer.clip_grad_norm(0.0)
                    optimizer.step()
            counts[name, size] = launches.names
    assert len(counts["adam", 30]) - len(counts["adam", 10]) >= (2 if flatten else 11) * 20
    # foreach_norm of a list is one, the stack of its results and their norm are two more
    assert len(counts["fused_adam", 30]) == len(counts["fused_adam", 10]) <= most, counts["fused_adam", 30]


@pytest.mark.parametrize("dtype, form, flatten", FORMS, ids=["fp16_memory", "bf16_memory", "bf16", "fp16", "fp16_flat"])
def test_no_operation_gets_tensors_of_two_types(dtype, form, flatten, monkeypatch):
    """A GPU would take them one by one, or all in the type of the first."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    weights = [*parameters(dtype), *parameters(torch.float32)]  # as with DLCL's W
    cfg = config("fused_adam", "bf16" if dtype == torch.bfloat16 else "fp16", flatten)
    optimizer = form.build_optimizer(cfg, weights)
    with Launches() as launches:
        optimizer.zero_grad()
        for weight in weights:
            weight.grad = weight.data.clone()
        optimizer._needs_sync = True
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.multiply_grads(0.5)
        optimizer._unscale_grads()
    assert any("_foreach_copy_" in name for name in launches.names) and launches.mixed == []
