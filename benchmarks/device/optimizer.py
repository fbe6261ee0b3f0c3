"""What fairseq's optimizer launches at an update, with the copies of parameters that it keeps for a precision."""

import contextlib
from unittest import mock

import torch
from fairseq import optim
from fairseq.dataclass.configs import CommonConfig, DistributedTrainingConfig, OptimizationConfig
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError, nearest

from .count import Counter


def build(model, name, precision, memory_efficient=False):
    """fairseq's optimizer *name* for the parameters of *model*, wrapped as its trainer does it."""
    if name not in OPTIMIZER_REGISTRY:
        raise UsageError(f"unknown optimizer {name}{nearest(name, OPTIMIZER_REGISTRY)}")
    common = {"fp16": precision == "fp16", "bf16": precision == "bf16"}
    cfg = OmegaConf.create({
        "common": OmegaConf.structured(CommonConfig(**common)),
        "optimization": OmegaConf.structured(OptimizationConfig(lr=[1e-3])),
        "distributed_training": OmegaConf.structured(DistributedTrainingConfig(distributed_world_size=1)),
        "optimizer": OmegaConf.structured(OPTIMIZER_DATACLASS_REGISTRY[name](_name=name)),
    })  # fmt: skip
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if precision == "fp32":
        return optim.build_optimizer(cfg.optimizer, parameters)
    cls = optim.MemoryEfficientFP16Optimizer if memory_efficient else optim.FP16Optimizer
    with on_device(parameters[0].device.index):  # fairseq knows devices by their number, and meta has none
        return cls.build_optimizer(cfg, parameters)


@contextlib.contextmanager
def on_device(device):
    """Within it, CUDA seems to be there, and *device* to be in use."""
    there = mock.patch.object(torch.cuda, "is_available", lambda: True)
    with there, mock.patch.object(torch.cuda, "current_device", lambda: device):
        yield


def update(optimizer, words, device="meta"):
    """What fairseq's trainer does with the gradients of a batch of so many *words*."""
    optimizer._needs_sync = True  # fp16: as after a backward pass
    optimizer.multiply_grads(1 / words)
    with on_device(torch.device(device)):
        norm = optimizer.clip_grad_norm(0.0)
    if not torch.isfinite(norm).all():
        raise FloatingPointError("gradients are NaN or infinite")
    optimizer.step()
    optimizer.zero_grad()


def count_update(model, name="adam", precision="fp16", memory_efficient=False):
    """Counts of an update of *model*, which is on the meta device; not the first, which makes the state."""
    counter = Counter()
    counter.counts, counter.phase = False, "optimizer"
    with counter:
        optimizer = build(model, name, precision, memory_efficient)
        for counter.counts in (False, True):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            update(optimizer, words=4096)
    model.zero_grad(set_to_none=True)
    return counter
