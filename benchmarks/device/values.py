"""Values of small tensors on the meta device, so that what depends on them takes its real course.

A tensor on the meta device has a shape, and no values. Padding, orders of hypotheses and the words of a search decide
which kernels run; they are small, and made of what is known. So they have a twin on the CPU, storage for storage: a view
of a tensor is the same view of its twin, and what is written in place is written there, too. What is made of unknown
tensors is unknown.
"""

import torch
from torch.utils._pytree import tree_map

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
        given = tensors_in([*args, *kwargs.values()])
        results = tensors_in(out if isinstance(out, (list, tuple)) else [out])
        written = [arg for arg, spec in self._arguments(func, args, kwargs) if spec.alias_info is not None
                   and spec.alias_info.is_write]  # fmt: skip
        random = torch.Tag.nondeterministic_seeded in func.tags
        large = any(tensor.untyped_storage().nbytes() > LARGEST for tensor in [*given, *results])
        if random or large or any(on_meta(tensor) and self.get(tensor) is None for tensor in given):
            for tensor in tensors_in(written):
                self.forget(tensor)
            return
        twins = self.run(func, args, kwargs)
        for tensor, twin in zip(results, tensors_in(twins if isinstance(twins, (list, tuple)) else [twins])):
            if on_meta(tensor) and tensor.untyped_storage()._cdata not in self.storages:
                self.put(tensor, twin)

    def run(self, func, args, kwargs):
        """*func* on the twins."""

        def twin(value):
            if on_meta(value):
                return self.get(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(twin, (args, kwargs))
        return func(*args, **kwargs)

    def _arguments(self, func, args, kwargs):
        specs = func._schema.arguments
        named = {spec.name: spec for spec in specs}
        return [*zip(args, specs), *((value, named[name]) for name, value in kwargs.items() if name in named)]
