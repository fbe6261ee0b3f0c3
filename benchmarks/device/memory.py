"""Memory by count: what is alive on the device at the peak of a training step, and the largest batch that fits."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import optimizer, training
from .count import Counter
from .values import on_meta, tensors_in

BLOCK = 512  # torch's allocator gives whole blocks of so many bytes
CONTEXT = 1e9  # of CUDA itself, cuBLAS's workspace and what lies between blocks


class Alive(TorchDispatchMode):
    """Bytes of all storages on the meta device that were made within it and are still there.

    Attributes:
        now, peak: at this moment, and at most so far
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in([*args, *(kwargs or {}).values()]):
            self._seen.add(tensor.untyped_storage())  # what was there before is not counted
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out if isinstance(out, (list, tuple)) else [out]):
            if on_meta(tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        if storage in self._seen:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._seen.add(storage)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size):
        self.now -= size


def peak_of_step(model, dictionary, tokens, length):
    """Bytes at the peak of forward and backward, gradients included and parameters not."""
    for parameter in model.parameters():
        parameter.grad = None
    alive = Alive()
    training.count_step(model, dictionary, tokens, length, within=alive)
    model.zero_grad(set_to_none=True)
    return alive.peak


def state_bytes(model, name, precision, memory_efficient):
    """Bytes of the parameters and of what the optimizer keeps from one update to the next."""
    alive, counter = Alive(), Counter()
    with counter, alive:
        wrapped = optimizer.build(model, name, precision, memory_efficient)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.update(wrapped, words=4096)
        model.zero_grad(set_to_none=True)
        counter.values.storages.clear()
    return alive.now + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def largest_batch(fresh, dictionary, capacity, length=256, name="adam", precision="fp16", memory_efficient=False):
    """Target words of the largest batch of sentences of *length* words, for each of the *capacity* (bytes).

    Args:
        fresh: makes the model, on the meta device

    Returns:
        bytes of the state, bytes a word, and the words for each capacity (0 if the state alone does not fit)
    """
    state = state_bytes(fresh(), name, precision, memory_efficient)
    few, many = 8 * length, 32 * length
    model = fresh()
    peaks = [peak_of_step(model, dictionary, words, length) for words in (few, many)]
    word = (peaks[1] - peaks[0]) / (many - few)
    fixed = state + peaks[0] - word * few
    words = [max(int((size - CONTEXT - fixed) / word / length), 0) * length for size in capacity]
    return fixed, word, words
