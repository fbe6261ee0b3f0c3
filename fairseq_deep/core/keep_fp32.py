"""Computation in fp32 in a half-precision model, and tensors that stay in fp32 when a model is converted."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """Return *x* at least in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class KeepFp32:
    """Mixin, left of the module class: keeps :meth:`fp32_tensors` in fp32 when the model becomes fp16 or bf16.

    The gradient of a weight in a sum over layers is a sum over all positions and features. It is the largest of the
    model and the first to overflow in fp16. Also, a softmax or a sum over 31 entries requires exact weights.
    """

    def fp32_tensors(self) -> list[Tensor]:
        """Return the parameters and buffers to keep in fp32."""
        return [self.weight]

    def _apply(self, fn, *args, **kwargs):
        exact = [(tensor.data, None if tensor.grad is None else tensor.grad.data) for tensor in self.fp32_tensors()]
        super()._apply(fn, *args, **kwargs)
        for tensor, (value, grad) in zip(self.fp32_tensors(), exact):
            if tensor.dtype in HALF:
                tensor.data = value.to(tensor.device, torch.float32)
                if grad is not None:
                    tensor.grad.data = grad.to(tensor.device, torch.float32)
        return self
