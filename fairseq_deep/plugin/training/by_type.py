"""fairseq's operations on all gradients, applied per data type.

A model in half precision that keeps some weights in fp32 (``keep_fp32.py``) has gradients of two types. In two places,
fairseq assumes that all gradients have the type of the first. The replacements (``patches.py``) apply fairseq's
operation to each type separately.
"""


import torch
from fairseq import utils
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.distributed import utils as distributed
from torch import Tensor


class DistributedDataParallelByType(LegacyDistributedDataParallel):
    """``--ddp-backend legacy_ddp`` and ``no_c10d``.

    fairseq copies all gradients into a buffer of the first parameter's type. In fp16, a gradient of 1e5 overflows
    there. Here, gradients of another type have a separate buffer.
    """

    def __init__(self, module, process_group, buffer_size=2**28):
        super().__init__(module, process_group, buffer_size)
        first = next(module.parameters()).dtype
        self.others: dict[torch.dtype, list[Tensor]] = {}
        for weight in module.parameters():
            if weight.dtype != first and weight.requires_grad and not hasattr(weight, "expert"):
                self.others.setdefault(weight.dtype, []).append(weight)
        self.per_device_params = [
            [weight for weight in weights if weight.dtype == first] for weights in self.per_device_params
        ]

    def all_reduce_grads(self):
        """Replace each gradient by its mean over the workers."""
        super().all_reduce_grads()
        if self.accumulate_grads:
            return
        for weights in self.others.values():
            for weight in weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            mean = torch.cat([weight.grad.flatten() for weight in weights]).div_(self.world_size)
            distributed.all_reduce(mean, self.process_group)
            for weight, part in zip(weights, mean.split([weight.numel() for weight in weights])):
                weight.grad.copy_(part.view_as(weight))


_norm_of_one_type = utils.multi_tensor_total_norm


def total_norm(grads: list[Tensor], *args, **kwargs) -> Tensor:
    """Return the norm of all *grads*, computed per type; apex's kernel assumes the type of the first for all."""
    lists = [[grad for grad in grads if grad.dtype == dtype] for dtype in dict.fromkeys(grad.dtype for grad in grads)]
    parts = [_norm_of_one_type(alike, *args, **kwargs) for alike in lists]
    return parts[0] if len(parts) == 1 else torch.norm(torch.stack(parts))
