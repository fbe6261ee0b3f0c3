"""A CUDA device that is not there.

Within ``AbsentCuda`` there are tensors that say they are on ``cuda:0``, and act so: operations take no others beside
them, types that a GPU's kernels refuse are refused, and whatever the host has to wait for is written down. Their values
are computed on the CPU, so that results can be compared. There are no gradients.

    device = AbsentCuda()
    with torch.no_grad(), device:
        output = device.take(model)(device.take(tokens))
        values = device.give(output)
    device.waits          # {"where the package asked for it: operation": how often}
"""

import contextlib
import ctypes
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fairseq_deep

PACKAGE = str(Path(fairseq_deep.__file__).parent)
C10 = Path(torch.__file__).parent / "lib" / "libc10.so"
AVAILABLE = C10.exists() and hasattr(torch._C, "_set_only_lift_cpu_tensors") and hasattr(torch, "set_autocast_dtype")
CUDA = "cuda:0"
# kernels that want one floating type; on a CPU, a norm takes weights of another
ONE_TYPE = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "native_layer_norm", "_fused_rms_norm", "embedding"}
# the shape of the output, or the answer, depends on values
ASKS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
        "bincount", "repeat_interleave"}  # fmt: skip
COPIES = {"_to_copy", "copy_"}


class CudaTensor(Tensor):
    """A tensor on the *device* that is not there, with its *values*."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, device):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=CUDA,
        )  # fmt: skip

    def __init__(self, values, device):
        self.values, self.cuda = values, device

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of AbsentCuda")

    def __repr__(self):
        return f"CudaTensor({self.values})"

    def tolist(self):  # torch's own refuses wrappers
        self.cuda.wait("tolist")
        return self.values.tolist()

    def __setitem__(self, index, value):  # torch's own makes a number a tensor on the device, unseen by any mode
        self.cuda.check("index_put_", [self, *tensors_in((index, value))], True)
        self.values[plain(index)] = plain(value)


def each(function, what):
    """*what*, nested as arguments and outputs are, with *function* of each tensor in its place."""
    if isinstance(what, Tensor):
        return function(what)
    if isinstance(what, (list, tuple)):
        return type(what)([each(function, part) for part in what])
    if isinstance(what, dict):
        return {key: each(function, part) for key, part in what.items()}
    return what


def tensors_in(what):
    found = []
    each(found.append, what)
    return found


def plain(what):
    """*what* with the values of tensors on the device in their place."""
    return each(lambda tensor: tensor.values if isinstance(tensor, CudaTensor) else tensor, what)


def asker():
    """The function of the package that is running, "file.function"; "" if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def gru_cell(x, h, before, bias_x, bias_h):
    """A kernel that only a GPU has; *x*, *h*: the products of its inputs; the second output is for its gradient."""
    (r, z, n), (h_r, h_z, h_n) = (x + bias_x).chunk(3, 1), (h + bias_h).chunk(3, 1)
    new = torch.tanh(n + torch.sigmoid(r + h_r) * h_n)
    return new + torch.sigmoid(z + h_z) * (before - new), new


class AbsentCuda(TorchDispatchMode):
    """See the module.

    Attributes:
        waits: how often each function of the package has made the host wait, and by what
    """

    def __init__(self):
        super().__init__()
        # where FakeTensorMode would be: factories do not look for a GPU
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.waits = Counter()
        self.guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(C10)), "_ZN3c104impl26device_guard_impl_registryE")
        self.before = []

    def __enter__(self):
        # what makes a device current: of cuda there is nothing in a build for CPUs, and that of cpu does nothing
        self.before.append((self.guards[1], torch._C._only_lift_cpu_tensors()))
        self.guards[1] = self.guards[0]
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes them on the CPU, and has them copied
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.guards[1], only_cpu = self.before.pop()
        torch._C._set_only_lift_cpu_tensors(only_cpu)

    def take(self, what):
        """*what* on the device: a tensor, or a module with its parameters and buffers."""
        if isinstance(what, Tensor):
            return CudaTensor(what, self)
        taken = {}
        for module in what.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:  # what modules share, they still do
                        taken.setdefault(id(tensor), (CudaTensor(tensor.detach(), self), tensor))
                        tensors[name] = taken[id(tensor)][0]
        return what

    def give(self, tensor):
        """The values of *tensor*, which has to be on the device."""
        assert isinstance(tensor, CudaTensor) and tensor.is_cuda
        return tensor.values

    @contextlib.contextmanager
    def autocast(self, dtype):
        """``torch.autocast("cuda", dtype)``, which does nothing where there is no GPU."""
        before = torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)

    def wait(self, operation):
        """Note that *operation* makes the host wait."""
        self.waits[f"{asker()}: {operation}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = tensors_in((args, kwargs))
        mine = {id(tensor.values): tensor for tensor in given if isinstance(tensor, CudaTensor)}
        on_device = bool(mine)
        if kwargs.get("device") is not None:
            on_device = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu"
        self.check(name, given, on_device)
        args, kwargs = plain((args, kwargs))
        if name in ("_softmax", "_log_softmax") and args[2]:  # half in, fp32 out: one kernel on a GPU, none on a CPU
            args = (args[0].float(), args[1], False)
        results = gru_cell(*args) if name == "_thnn_fused_gru_cell" else func(*args, **kwargs)
        if not on_device:
            return results
        return each(lambda values: self._wrap(values, mine), results)

    def _wrap(self, values, mine):
        known = mine.get(id(values))  # the result of an operation in place is one of its arguments
        if known is None:
            return CudaTensor(values, self)
        if known.shape != values.shape:
            with self:  # resize_, which fairseq's beam search calls
                known.data = CudaTensor(values, self)
        return known

    def check(self, name, given, on_device):
        """Refuse what a GPU refuses of the operation *name* on the tensors *given*, and note what it waits for."""
        here = [tensor for tensor in given if isinstance(tensor, CudaTensor)]
        there = [tensor for tensor in given if not isinstance(tensor, CudaTensor)]
        if name in COPIES:
            if there if on_device else here:
                self.wait("copy")
        elif here and any(tensor.dim() > 0 for tensor in there):  # a number may be on the CPU
            raise AssertionError(f"{asker()}: {name} of tensors on the CPU and on the GPU")
        masks = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in here[1:])
        if here and (name in ASKS or masks):
            self.wait(name)
        kinds = {tensor.dtype for tensor in here if tensor.is_floating_point()}
        if name in ONE_TYPE and len(kinds) > 1:
            raise AssertionError(f"{asker()}: {name} of {kinds}")
