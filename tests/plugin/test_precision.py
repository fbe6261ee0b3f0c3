"""Half precision with weights of sums in fp32, over workers; precisions and backends that a machine lacks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.models import DistributedFairseqModel
from torch import nn

from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training import by_type, checks
from tests.helpers.flags import parse

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
    settings = SimpleNamespace(
        ddp_backend=backend, tpu=False, device_id=None, ddp_comm_hook="none", broadcast_buffers=False, bucket_cap_mb=25,
        find_unused_parameters=True, gradient_as_bucket_view=False, heartbeat_timeout=-1,
    )  # fmt: skip
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
    torch.multiprocessing.start_processes(in_a_worker, (folder,), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_reduced_in_their_own_type(backend, dtype, workers):
    """Each worker adds its gradient twice, so the mean is the sum of both; those of 1e5 are exact, as in fp32."""
    for rank, cases in enumerate(workers):
        alone, grads = cases[backend, dtype]
        assert [float(grad.max()) for grad in alone] == [1e5 * (rank + 1) + 1] * 2, "not reduced under no_sync"
        for name in ("sums.0", "sums.1"):
            assert grads[name].dtype == torch.float32 and (grads[name] == 3e5 + 2).all()
        assert grads["weight"].dtype == dtype and (grads["weight"] == 3).all()
        assert grads["frozen"] is None and (grads["unused"] is None or not grads["unused"].any())


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


def on_gpu(dtype, is_gpu=True):
    return lambda: checks.check_device(SimpleNamespace(is_cuda=is_gpu, dtype=dtype))


def parsed(flags):
    return lambda: parse("--arch", TINY, "--optimizer", "adam", *flags.split())


# what a machine has, a call, what is refused
MACHINES = {
    # fairseq's flattened copies would exclude all three
    "muon with rates of layers in fp16": (
        {}, parsed("--arch transformer_prenorm_2l2l_tiny --residual completep --completep-rates --fp16 --cpu "
                   "--optimizer muon"), ""),
    "slowmo of two workers": ({"workers": "2"}, parsed("--ddp-backend slowmo"), "requires fairscale"),
    "slowmo with fairscale": ({"workers": "2", "fairscale": True}, parsed("--ddp-backend slowmo"), ""),
    "bf16 on a GPU without it": ({"bf16": False}, on_gpu(torch.bfloat16), "use --fp16"),
    "bf16 on a GPU with it": ({}, on_gpu(torch.bfloat16), ""),
    "fp16 on a GPU without bf16": ({"bf16": False}, on_gpu(torch.float16), ""),
    "bf16 on a CPU beside a GPU without it": ({"bf16": False}, on_gpu(torch.bfloat16, False), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", MACHINES)
def test_a_precision_or_backend_that_a_machine_lacks_is_refused(case, monkeypatch):
    machine, call, words = MACHINES[case]
    monkeypatch.setenv("WORLD_SIZE", machine.get("workers", "1"))
    monkeypatch.setattr(checks, "find_spec", lambda name: machine.get("fairscale"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "bf16 on a" in case or "fp16 on a" in case)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: machine.get("bf16", True))
    if words:
        with pytest.raises(UsageError, match=words):
            call()
    else:
        call()


def test_the_device_is_checked_when_a_model_moves(build, monkeypatch):
    """A copy of a model in half precision also keeps the weights of sums in fp32."""
    seen = []
    check = "fairseq_deep.plugin.models.deep_transformer.check_device"
    monkeypatch.setattr(check, lambda weight: seen.append(weight.dtype))
    moved = build(TINY).to(dtype=torch.bfloat16).to(torch.device("cpu"))
    assert seen == [torch.bfloat16] * 2
    assert copy.deepcopy(moved).encoder.aggregator.weight.dtype == torch.float32


def test_gradients_of_weights_in_fp32_are_not_sent_in_fp16(build):
    """Models without such weights, and training runs in fp32, may send in fp16; the rest is in ``tests/errors``."""
    build(TINY, ddp_comm_hook="fp16")
    build(TINY, ddp_comm_hook="none", fp16=True)
    plain = build("transformer_prenorm_2l2l_tiny", ddp_comm_hook="fp16", fp16=True)
    assert not any(isinstance(part, KeepFp32) for part in plain.modules())
