"""A weight of sums over layers that stays exact when its model is converted to half precision."""

import torch


class ExactWeight:
    """Mixin, left of the module class: leave ``weight`` in fp32 when the model is converted to half precision.

    A gradient of such a weight sums over all positions and features, so that it is the largest of the model and the
    first to overflow in fp16; and a softmax or a sum over 31 entries wants exact weights.
    """

    def _apply(self, fn, *args, **kwargs):
        exact = self.weight.data
        super()._apply(fn, *args, **kwargs)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            self.weight.data = exact.to(self.weight.device, torch.float32)
            if self.weight.grad is not None:
                self.weight.grad.data = self.weight.grad.data.float()
        return self
