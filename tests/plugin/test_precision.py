"""Half precision with weights of sums in fp32, over workers; what a machine or the package cannot do, in one line."""

import argparse
import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.models import ARCH_CONFIG_REGISTRY, DistributedFairseqModel
from torch import nn

from fairseq_deep.core.dropout import Dropout
from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import by_type, checks
from tests.helpers.flags import parse
from tests.helpers.methods import METHODS, OPTIONS
from tests.helpers.models import make_batch

TINY = "transformer_dlcl_2l2l_tiny"


class TwoTypes(nn.Module):
    """A model whose gradients are given: those of *sums* are too large for fp16."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
        self.sums = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in [(2, 2), ()])
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, rank):
        large = sum((weight * (1e5 * (rank + 1) + 1)).sum() for weight in self.sums)
        return (self.weight.float() * (rank + 1)).sum() + large


BACKENDS = ("no_c10d", "legacy_ddp", "pytorch_ddp")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reduced(rank, backend, dtype):
    """Gradients before and after they are reduced by fairseq's wrapper."""
    settings = dict(ddp_backend=backend, tpu=False, device_id=None, ddp_comm_hook="none", broadcast_buffers=False)
    settings.update(bucket_cap_mb=25, find_unused_parameters=True, gradient_as_bucket_view=False, heartbeat_timeout=-1)
    settings = SimpleNamespace(**settings)
    model = DistributedFairseqModel(settings, TwoTypes(dtype), torch.distributed.group.WORLD, torch.device("cpu"))
    with model.no_sync():
        model(rank).backward()
        if backend != "pytorch_ddp":
            model.all_reduce_grads()  # not now
    alone = [weight.grad.clone() for weight in model.sums]
    model(rank).backward()
    if backend != "pytorch_ddp":
        model.all_reduce_grads()
    return alone, {name: weight.grad for name, weight in model.module.module.named_parameters()}


def in_a_worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    cases = {(backend, dtype): reduced(rank, backend, dtype) for backend in BACKENDS for dtype in DTYPES}
    torch.save(cases, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each of two workers has in each case; they are started once."""
    folder = tmp_path_factory.mktemp("workers")
    torch.multiprocessing.spawn(in_a_worker, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_reduced_in_their_own_type(backend, dtype, workers):
    for rank, cases in enumerate(workers):
        alone, grads = cases[backend, dtype]
        assert [float(grad.max()) for grad in alone] == [1e5 * (rank + 1) + 1] * 2, "not reduced under no_sync"
        # each worker adds its gradient twice: the mean is the sum of both
        for name in ("sums.0", "sums.1"):
            assert grads[name].dtype == torch.float32
            assert torch.equal(grads[name], torch.full_like(grads[name], 3e5 + 2)), "exact, as fp32 has it"
        assert grads["weight"].dtype == dtype and (grads["weight"] == 3).all()
        assert grads["frozen"] is None
        assert grads["unused"] is None or not grads["unused"].any()


def test_fairseq_itself_overflows(process_group):
    """If it no longer does, the replacement can go; where all is of one type it is fairseq's."""
    largest, forms = [], (LegacyDistributedDataParallel, by_type.DistributedDataParallelByType)
    for form in forms:
        model = form(TwoTypes(torch.float16), torch.distributed.group.WORLD)
        model(0).backward()
        model.all_reduce_grads()
        largest.append(float(model.module.sums[0].grad.max()))
    assert largest == [float("inf"), 100001.0]
    plain, model = (form(nn.Linear(2, 2).half(), torch.distributed.group.WORLD) for form in forms)
    assert model.others == {} and [*map(len, model.per_device_params)] == [*map(len, plain.per_device_params)]


def test_the_norm_that_apex_computes_is_of_one_type_at_a_time(monkeypatch):
    """apex's kernel, which reads all gradients in the type of the first."""
    asked = []

    def of_one_type(grads, chunk_size=0):
        asked.append({grad.dtype for grad in grads})
        return torch.linalg.vector_norm(torch.cat([grad.float().flatten() for grad in grads]))

    monkeypatch.setattr(by_type, "_norm_of_one_type", of_one_type)
    monkeypatch.setattr(utils, "multi_tensor_l2norm_available", True)
    model = TwoTypes(torch.float16)
    model(0).backward()
    grads = [weight.grad.float().flatten() for weight in model.parameters() if weight.grad is not None]
    expected = torch.linalg.vector_norm(torch.cat(grads))
    torch.testing.assert_close(utils.clip_grad_norm_(model.parameters(), 0.0), expected)
    assert asked == [{torch.float16}, {torch.float32}]


@pytest.mark.parametrize("flag", ["--memory-efficient-fp16", "--memory-efficient-bf16"])
@pytest.mark.parametrize("name", ["adam", "fused_adam"])
def test_what_stays_exact_is_updated_in_fp32(flag, name, build, dictionary):
    """fairseq's optimizer that keeps no fp32 copies: a step too small for half precision still moves W."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.optim import MemoryEfficientFP16Optimizer

    line = ["--arch", TINY, "--optimizer", name, "--lr", "1e-5", flag, "--cpu", "--share-all-embeddings"]
    cfg = convert_namespace_to_omegaconf(parse(*line))
    model = build(TINY).to(torch.float16 if "fp16" in flag else torch.bfloat16)
    weight = model.encoder.aggregator.weight
    before = weight.detach().clone()
    optimizer = MemoryEfficientFP16Optimizer.build_optimizer(cfg, list(model.parameters()))
    weight.grad = torch.full_like(weight, 1e5)
    optimizer.multiply_grads(1.0)
    assert float(optimizer.clip_grad_norm(0.0)) == pytest.approx(1e5 * weight.numel() ** 0.5, rel=1e-6)
    optimizer.step()
    assert weight.dtype == torch.float32
    torch.testing.assert_close(before - weight, torch.full_like(weight, 1e-5), rtol=1e-2, atol=0)


def parsed(*flags):
    return parse("--arch", TINY, "--optimizer", "adam", *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--fp16", "--memory-efficient-fp16", "--cpu"],
        ["--fp16", "--fp16-no-flatten-grads", "--cpu"],
        ["--bf16", "--cpu"],
        ["--amp", "--cpu"],
        ["--ddp-backend", "legacy_ddp"],
        ["--ddp-backend", "slowmo"],
    ],
    ids=" ".join,
)
def test_what_works_is_not_refused(flags):
    parsed(*flags)


def test_fp16_on_a_cpu_without_half_precision_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "half_on_cpu", lambda: False)
    with pytest.raises(
        UsageError, match="--fp16 requires a GPU, but this run has none: use --bf16, or omit it"
    ):
        parsed("--memory-efficient-fp16", "--cpu")


def test_half_on_a_cpu_is_tried(monkeypatch):
    assert checks.half_on_cpu()

    def missing(*args):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(nn.functional, "linear", missing)
    assert not checks.half_on_cpu()


@pytest.mark.parametrize("workers, installed, refused", [("2", False, True), ("1", False, False), ("2", True, False)])
def test_slowmo_needs_fairscale(workers, installed, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", workers)
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if installed else None)
    if refused:
        with pytest.raises(UsageError, match="requires fairscale"):
            parsed("--ddp-backend", "slowmo")
    else:
        parsed("--ddp-backend", "slowmo")


def test_flags_of_a_checkpoint_are_another_machines():
    flags = argparse.Namespace(_name=TINY, fp16=True, cpu=True, ddp_backend="fully_sharded")
    ARCH_CONFIG_REGISTRY[TINY](flags)
    assert flags.encoder_layers == 2


@pytest.mark.parametrize("on_gpu, dtype, supported, refused", [
    (True, torch.bfloat16, False, True),
    (True, torch.bfloat16, True, False),
    (True, torch.float16, False, False),
    (False, torch.bfloat16, False, False),
])  # fmt: skip
def test_bf16_on_a_gpu_without_it(on_gpu, dtype, supported, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    weight = SimpleNamespace(is_cuda=on_gpu, dtype=dtype)
    if refused:
        with pytest.raises(UsageError, match="use --fp16"):
            checks.check_device(weight)
    else:
        checks.check_device(weight)


def test_a_model_is_looked_at_when_it_moves(build, monkeypatch):
    seen = []
    check = "fairseq_deep.plugin.models.deep_transformer.check_device"
    monkeypatch.setattr(check, lambda weight: seen.append(weight.dtype))
    build(TINY).to(dtype=torch.bfloat16).to(torch.device("cpu"))
    assert seen == [torch.bfloat16] * 2


def test_what_is_kept_in_fp32_is_sent_in_fp32(build):
    """Refused otherwise; models without such weights, and trainings in fp32, may send in fp16."""
    for arch, flags in ((TINY, {}), ("transformer_prenorm_2l2l_tiny", {"fp16": True})):
        assert any(isinstance(part, KeepFp32) for part in build(arch).modules()) == (arch == TINY)
        build(arch, ddp_comm_hook="fp16", **flags)
    build(TINY, ddp_comm_hook="none", fp16=True)


def test_a_copy_of_a_half_model_is_exact_too(build):
    model = copy.deepcopy(build(TINY).half())
    assert model.encoder.aggregator.weight.dtype == torch.float32


# relative error of the whole gradient in fp16; EM routing divides by variances that can be near to nothing
ERRORS = {"layer_agg-routing": 0.5}


@pytest.mark.parametrize("case", [*METHODS, *OPTIONS])
def test_gradients_in_fp16_are_near_to_those_in_fp32(case, build, dictionary):
    name, flags = {**METHODS, **OPTIONS}[case]
    exact, batch = build(name, **flags).train(), make_batch(dictionary)
    with torch.no_grad():
        for parameter in exact.parameters():  # no gate closed, and what fp16 holds
            parameter.copy_(parameter.add(0.02 * torch.randn_like(parameter)).half())
    for module in exact.modules():
        if isinstance(module, Dropout):  # those that flags ask for, and their defaults
            module.p = 0.0
    words, gradients = torch.randint(len(dictionary), (batch[2].numel(),)), []
    for model in (exact, copy.deepcopy(exact).half()):
        output = model(*batch)[0]
        assert output.dtype == model.decoder.output_projection.weight.dtype
        (128 * torch.nn.functional.cross_entropy(output.float().flatten(0, 1), words)).backward()
        gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()
                                    if parameter.requires_grad]))  # fmt: skip
    assert gradients[1].isfinite().all()
    assert (gradients[1] - gradients[0]).norm() < ERRORS.get(case, 0.05) * gradients[0].norm()
