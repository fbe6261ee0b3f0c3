"""``--optimizer fused_adam``: fairseq's Adam, its flags and its checkpoints, in a few launches for all tensors."""

import torch
from fairseq.optim import FairseqOptimizer, adam, register_optimizer
from fairseq.optim.adam import FairseqAdamConfig

from fairseq_deep.core.registry import UsageError

from .adam import FusedAdam
from .tensors import alike, norms


@register_optimizer("fused_adam", dataclass=FairseqAdamConfig)
class FairseqAdam(adam.FairseqAdam):
    """fairseq's ``adam``, also in name: fairseq loads the state of an optimizer only into one of the same class name.

    Raises:
        UsageError: a flag of fairseq's that asks for another Adam
    """

    def __init__(self, cfg, params):
        FairseqOptimizer.__init__(self, cfg)
        for flag in ("use_old_adam", "fp16_adam_stats"):
            if getattr(cfg, flag, False):
                dashed = flag.replace("_", "-")
                raise UsageError(f"--{dashed} is not supported with --optimizer fused_adam: leave it out, or use adam")
        self._optimizer = FusedAdam(params, **self.optimizer_config)

    def multiply_grads(self, c):
        for (grads,) in alike([weight.grad for weight in self.params if weight.grad is not None]):
            torch._foreach_mul_(grads, c.to(grads[0].device) if torch.is_tensor(c) else c)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None):
        """The norm of all gradients, which are scaled down to *max_norm* where it is positive and smaller."""
        grads = [weight.grad for weight in self.params if weight.grad is not None]
        if not grads or any(hasattr(weight, "expert") for weight in self.params):
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        parts = [norm.float().to(grads[0].device) for (part,) in alike(grads) for norm in norms(part)]
        total = torch.norm(torch.stack(parts))
        if aggregate_norm_fn is not None:
            total = aggregate_norm_fn(total)
        if max_norm > 0:
            factor = (float(max_norm) / (total + 1e-6)).clamp_(max=1)
            for (part,) in alike(grads):
                torch._foreach_mul_(part, factor.to(part[0].device))
        return total
