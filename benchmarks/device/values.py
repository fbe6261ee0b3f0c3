"""Values of small tensors on the meta device, so that what depends on them takes its real course.

A tensor on the meta device has a shape, and no values. Padding, orders of hypotheses and the words of a search decide
which kernels run; they are small, and made of what is known. So they have a twin on the CPU, storage for storage: a
view of a tensor is the same view of its twin, and what is written in place is written there, too. What is made of
unknown tensors is unknown.
"""

import torch
from torch.utils._pytree import tree_map

OVERWRITES = ("copy_", "fill_", "zero_")
LARGEST = 1 << 22  # bytes; weights and activations are unknown in any case


def on_meta(value):
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def tensors_in(values):
    """All tensors in arguments or results of an operation, lists of tensors included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def mutated(func, args, kwargs):
    """The arguments that *func* writes to."""
    specs = func._schema.arguments
    named = {spec.name: spec for spec in specs}
    pairs = [*zip(args, specs), *((value, named[name]) for name, value in kwargs.items())]
    return [value for value, spec in pairs if spec.alias_info is not None and spec.alias_info.is_write]


class Values:
    """The twins of all tensors whose values are known."""

    def __init__(self):
        self.storages = {}  # by identity: the storage on the meta device, which is kept alive, and its twin

    def get(self, tensor):
        """The twin of *tensor*, or None if its values are unknown."""
        known = self.storages.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        twin = torch.empty(0, dtype=tensor.dtype)
        return twin.set_(known[1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def put(self, tensor, value):
        """From now on *tensor* has the values of *value*."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > LARGEST:
            return
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage, torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        self.get(tensor).copy_(value)

    def forget(self, tensor):
        self.storages.pop(tensor.untyped_storage()._cdata, None)

    def follow(self, func, args, kwargs, out):
        """Do with the twins what *func* has done with the tensors."""
        name, written = func._schema.name.split("::")[1], tensors_in(mutated(func, args, kwargs))
        results = tensors_in(out if isinstance(out, (list, tuple)) else [out])
        if name in OVERWRITES:
            self._start(args[0])
        twins = self._try(func, args, kwargs, results, name)
        for tensor in written if twins is None else ():
            self.forget(tensor)
        for tensor, twin in zip(results, twins or ()):
            if on_meta(tensor) and tensor.untyped_storage()._cdata not in self.storages:
                self.put(tensor, twin)

    def _start(self, tensor):
        """All of *tensor* is about to be written, so that what was there does not matter."""
        storage = tensor.untyped_storage()
        if on_meta(tensor) and tensor.numel() * tensor.element_size() == storage.nbytes():
            self.put(tensor, torch.zeros((), dtype=tensor.dtype))

    def _try(self, func, args, kwargs, results, name):
        """The twins of the *results*, or None: of random numbers, of unknown or large tensors, of what a CPU cannot."""
        given = tensors_in([*args, *kwargs.values()])
        random = torch.Tag.nondeterministic_seeded in func.tags or ("empty" in name and results[0].numel() > 0)
        large = any(tensor.untyped_storage().nbytes() > LARGEST for tensor in [*given, *results])
        if random or large or any(on_meta(tensor) and self.get(tensor) is None for tensor in given):
            return None
        try:
            twins = self.run(func, args, kwargs)
        except RuntimeError:
            return None
        return tensors_in(twins if isinstance(twins, (list, tuple)) else [twins])

    def run(self, func, args, kwargs):
        """*func* on the twins."""

        def twin(value):
            if on_meta(value):
                return self.get(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(twin, (args, kwargs))
        return func(*args, **kwargs)
