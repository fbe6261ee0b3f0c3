"""Random weights, and what a computation keeps and launches."""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DOUBLE = {"dtype": torch.float64}


def shake(module, deviation=0.4, around=False):
    """Random weights that no start has, or with *around*, weights near those of *module*."""
    with torch.no_grad():
        for parameter in module.parameters():
            noise = deviation * torch.randn_like(parameter)
            parameter.copy_(parameter + noise if around else noise)
    return module


def saved_bytes(function, own=()):
    """Bytes of the storages that autograd keeps after *function*, each once and without those of *own*."""
    own = {tensor.data_ptr() for tensor in own}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in kept.values())


class Kernels(TorchDispatchMode):
    """Operations on the device of the tensors, where ``meta`` stands for a GPU.

    Tensors on ``meta`` have no values. Reading one fails, and a condition on one is counted and true. An operation that
    mixes tensors on the CPU and on ``meta`` fails, unless it copies.

    Attributes:
        names: those that are more than views of a tensor
        asked: how many values Python wanted to know
        copied: how many tensors came from the CPU
    """

    def __init__(self):
        super().__init__()
        self.names, self.asked, self.copied = [], 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function), kwargs or {}
        views = any(result.alias_info and not result.alias_info.is_write for result in function._schema.returns)
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0 or tensor.is_meta}
        if "copy" in name:
            self.copied += len(devices) > 1 or devices == {"cpu"} and str(kwargs.get("device")) == "meta"
        else:
            assert len(devices) < 2, f"{name} of tensors on the CPU and on the device"
        if name in ("aten._local_scalar_dense.default", "aten.equal.default"):
            self.asked += 1
            if args[0].is_meta:
                return True
        elif not (views or "empty" in name or "_unsafe_view" in name):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs)


def tensors_on_modules(model):
    """Names of attributes, other than parameters and buffers, that hold a tensor, also in lists and dictionaries."""

    def holds(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple, set)):
            return any(map(holds, value))
        return torch.is_tensor(value)

    own = ("_parameters", "_buffers", "_modules")
    return {
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in own and holds(value)
    }


def assert_same(actual, expected, sources, unused=False, **near):
    """The same values and, in one random direction, gradients of all *sources*; return the expected gradients.

    Args:
        sources: tensors, or {name: tensor}, whose gradients are then not 0, unless it is the bias of keys
        unused: some sources may have no gradient
    """
    torch.testing.assert_close(actual, expected, **near)
    named, direction = dict(sources if isinstance(sources, dict) else enumerate(sources)), torch.randn_like(actual)
    wanted, found = (torch.autograd.grad(y, [*named.values()], direction, True, allow_unused=unused,
                                         materialize_grads=unused) for y in (expected, actual))  # fmt: skip
    for name, want, got in zip(named, wanted, found):
        torch.testing.assert_close(got, want, **near, msg=lambda text, name=name: f"gradient of {name}: {text}")
        assert unused or name in range(len(named)) or want.any() or name.endswith("k_proj.bias"), name
    return wanted


def case(shape, bias=True):
    """A linear layer and an input; *shape*: length, sentences, features in and out."""
    length, batch, inputs, outputs = shape
    return nn.Linear(inputs, outputs, bias=bias).eval(), torch.randn(length, batch, inputs)
