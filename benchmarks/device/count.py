"""Kernels, bytes, flops and host synchronisations of whatever runs on tensors of the meta device.

A kernel is an operation of ATen that is no view, and each copy that CUDA makes first because it cannot take an operand
as it lies. An operation of lists of tensors is as many kernels as its tensors need. A kernel reads each operand once
and writes each result once. Flops are those of matrix products and attention.
"""

import collections
import contextlib
import linecache
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fairseq_deep

from .costs import LAUNCHES, bytes_moved, copied_operands, list_launches, size
from .cuda_paths import cuda_paths
from .values import Values, on_meta, tensors_in

aten = torch.ops.aten
TORCH = str(Path(torch.__file__).parent)
OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("compiling", "costs", "count", "cuda_paths", "values")
)
PACKAGE = str(Path(fairseq_deep.__file__).parent)
ENGINE = tuple(f"{TORCH}/autograd/{name}.py" for name in ("__init__", "graph"))  # what starts a backward pass
UNSEEN = ("empty", "detach", "_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "alias")
SHAPED_BY_VALUES = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.index, aten.index_put_)


class Kernel(NamedTuple):
    """One launch. *where*: file, function and text of the line that made it; *line*: its number."""

    op: str
    bytes: int
    flops: int
    half: bool
    phase: str
    where: tuple
    line: int


class Sync(NamedTuple):
    """One wait for the device. *known*: its outcome follows from the batch; else it was guessed."""

    op: str
    phase: str
    where: tuple
    line: int
    known: bool


def available():
    """Whether this torch has what the counter needs."""
    return hasattr(torch._C, "_current_autograd_node") and hasattr(torch.autograd, "_get_sequence_nr")


def caller():
    """Where in the source an operation is asked for: the innermost line of this package, else outside of torch.

    None if the engine of autograd asks for it.
    """
    frame, found = sys._getframe(1), None
    while frame is not None and frame.f_code.co_filename not in ENGINE:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return _where(frame)
        if found is None and not name.startswith((TORCH, "<", *OWN)) and not name.endswith("contextlib.py"):
            found = frame
        frame = frame.f_back
    return _where(found) if found is not None else None


def _where(frame):
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return (short_path(code.co_filename), getattr(code, "co_qualname", code.co_name), text), frame.f_lineno


def short_path(name):
    """The path of a file from the folder of its package on, or from this repository on."""
    installed, _, inside = name.rpartition("/site-packages/")
    return inside if installed else os.path.relpath(name, Path(PACKAGE).parent)


class Counter(TorchDispatchMode):
    """Counts what runs within it on tensors of the meta device as if they were on a GPU.

    Attributes:
        phase: a name for what runs now
        kernels, syncs: what was counted
        counts: whether it counts now; values are followed in any case
        values: what is known of tensors
    """

    def __init__(self):
        super().__init__()
        self.phase, self.counts = "", True
        self.kernels, self.syncs, self.values = [], [], Values()
        self._made_by = {}  # nodes of autograd, by number: where the operation stands in the source
        self._paths = None

    @classmethod
    def ignore_compile_internals(cls):
        return True  # what compiled code runs is counted; how it is made is not

    @contextlib.contextmanager
    def paused(self):
        counts, self.counts = self.counts, False
        yield
        self.counts = counts

    def __enter__(self):
        self._paths = cuda_paths()
        self._paths.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._paths.__exit__(*error)

    def enter(self, phase):
        self.phase = phase

    def tensor(self, value):
        """*value*, a tensor on the CPU, as one on the device whose values are known."""
        tensor = torch.empty_like(value, device="meta", memory_format=torch.contiguous_format)
        self.values.put(tensor, value)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_in([*args, *kwargs.values()])
        device = kwargs.get("device")
        if not any(map(on_meta, given)) and (device is None or torch.device(device).type != "meta"):
            return func(*args, **kwargs)
        where = self._source()
        answer = self._ask(func, args, kwargs, where)
        if answer is not None:
            return answer[0]
        out = func(*args, **kwargs)
        self.values.follow(func, args, kwargs, out)
        self._add_norm(func, out)
        if self.counts and not self._is_view(func):
            self._add(func, args, kwargs, out, where)
        return out

    def _source(self):
        """Where this operation stands in the source; in a backward pass, where that stands of which it is part."""
        where, node = caller(), torch._C._current_autograd_node()
        if where is None and node is not None:
            where = self._made_by.get(node._sequence_nr())
        where = where or (("autograd", "", ""), 0)
        if torch.is_grad_enabled():
            self._made_by.setdefault(torch.autograd._get_sequence_nr() - 1, where)
        return where

    def _is_view(self, func):
        name = func._schema.name.split("::")[1]
        if name.startswith(UNSEEN) or name in ("new_empty", "new_empty_strided"):
            return True
        return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)

    def _add_norm(self, func, out):
        """A norm is 1: what follows from it is that nothing overflows."""
        if func._overloadpacket is aten.linalg_vector_norm and out.dim() == 0:
            self.values.put(out, torch.ones(()))

    def _add(self, func, args, kwargs, out, where):
        packet, name = func._overloadpacket, func._schema.name.split("::")[1]
        given = tensors_in([*args, *kwargs.values()])
        results = tensors_in(out if isinstance(out, (list, tuple)) else [out])
        if results and not any(tensor.numel() for tensor in results):
            return  # nothing to compute, nothing is launched
        for operand in copied_operands(packet, args):
            self._kernel("copy of an operand", 2 * size(operand), 0, operand, where)
        operands = [part for part in args if not isinstance(part, torch.dtype)]  # the formulas know no out_dtype
        flops = flop_registry[packet](*operands, **kwargs, out_val=out) if packet in flop_registry else 0
        moved, launches = bytes_moved(func, args, kwargs, given, results), LAUNCHES.get(packet, 1)
        if name.startswith(("_foreach", "_fused")):
            lists = [tensors_in(value) for value in [*args, *kwargs.values()] if isinstance(value, (list, tuple))]
            launches = list_launches([tensors for tensors in lists if any(map(on_meta, tensors))])
        for _ in range(launches):
            self._kernel(name, moved // launches, flops // launches, (given or results)[0], where)

    def _kernel(self, name, moved, flops, tensor, where):
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        self.kernels.append(Kernel(name, moved, flops, half, self.phase, *where))

    def _sync(self, name, where, known):
        if self.counts:
            self.syncs.append(Sync(name, self.phase, *where, known))

    def _ask(self, func, args, kwargs, where):
        """A tuple with the result if *func* asks the device for values, which the meta device has not; else None."""
        packet, name = func._overloadpacket, func._schema.name.split("::")[1]
        if packet is aten._local_scalar_dense:
            twin = self.values.get(args[0])
            self._sync(name, where, twin is not None)
            return (twin.item() if twin is not None else torch.ones((), dtype=args[0].dtype).item(),)
        if packet is aten.equal:
            twins = [self.values.get(tensor) if on_meta(tensor) else tensor for tensor in args]
            known = all(twin is not None for twin in twins)
            for part, moved in (("eq", sum(map(size, args)) + args[0].numel()), ("all", args[0].numel())):
                if self.counts:
                    self._kernel(f"equal: {part}", moved, 0, args[0], where)
            self._sync(name, where, known)
            return (torch.equal(*twins) if known else True,)
        device = kwargs.get("device")
        if packet is aten._to_copy and device is not None and torch.device(device).type == "cpu":
            return (self._to_host(func, args, kwargs, where),)
        if packet is aten.copy_ and not on_meta(args[0]):
            twin = self.values.get(args[1])
            self._sync("copy to the host", where, twin is not None)
            return (args[0].copy_(twin) if twin is not None else args[0].fill_(1),)
        if packet in SHAPED_BY_VALUES:
            return self._shaped(func, packet, args, kwargs, where)
        return None

    def _to_host(self, func, args, kwargs, where):
        twin = self.values.get(args[0])
        self._sync("copy to the host", where, twin is not None)
        return func(twin if twin is not None else torch.ones_like(args[0], device="cpu"), *args[1:], **kwargs)

    def _shaped(self, func, packet, args, kwargs, where):
        """What has a shape that depends on values: the host waits to know how much there is."""
        masks = [args[0]]
        if packet in (aten.index, aten.index_put_):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if not masks:
                return None
            if packet is aten.index_put_ and not on_meta(args[2]) and args[2].numel() == 1:  # CUDA fills by the mask
                self._add(aten.masked_fill_.Scalar, (args[0], masks[0], 0.0), {}, args[0], where)
                self.values.forget(args[0])
                return (args[0],)
        elif packet is aten.masked_select:
            masks = [args[1]]
        needed = [tensor for tensor in tensors_in(args) if on_meta(tensor)]
        known = all(self.values.get(mask) is not None for mask in masks)
        everything = all(self.values.get(tensor) is not None for tensor in needed)
        for mask in masks:
            if self.counts and packet not in (aten.nonzero, aten._unique2, aten.unique_dim):
                self._kernel("nonzero", size(mask), 0, mask, where)
            self._sync(func._schema.name.split("::")[1], where, known)
        if everything:
            out = self.values.run(func, args, kwargs)
            out = args[0] if packet is aten.index_put_ else out
        elif packet is aten.index_put_:
            self.values.forget(args[0])
            out = args[0]
        else:
            out = func(*[self._guess(arg) for arg in args], **kwargs)
        if packet is not aten.index_put_:
            outs = out if isinstance(out, (list, tuple)) else [out]
            made = [self.tensor(value) if everything else value.to("meta") for value in outs]
            out = type(out)(made) if isinstance(out, (list, tuple)) else made[0]
        if self.counts:
            self._add(func, args, kwargs, out, where)
        return (out,)

    def _guess(self, value):
        """A mask of unknown values hides everything."""
        if isinstance(value, (list, tuple)):
            return [self._guess(item) for item in value]
        if not on_meta(value):
            return value
        twin = self.values.get(value)
        return twin if twin is not None else torch.zeros_like(value, device="cpu")


def by_op(kernels):
    """(operation, kernels, bytes, flops), most kernels first."""
    return _grouped(kernels, lambda kernel: kernel.op)


def by_line(kernels):
    """((file, function, text), kernels, bytes, flops), most kernels first."""
    return _grouped(kernels, lambda kernel: kernel.where)


def _grouped(kernels, key):
    groups = collections.defaultdict(lambda: [0, 0, 0])
    for kernel in kernels:
        group = groups[key(kernel)]
        group[0], group[1], group[2] = group[0] + 1, group[1] + kernel.bytes, group[2] + kernel.flops
    return sorted(((name, *group) for name, group in groups.items()), key=lambda row: (-row[1], str(row[0])))
