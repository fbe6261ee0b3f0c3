"""``--optimizer fused_adam`` and ``muon``, with fairseq's flags for Adam and few launches for all tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.optim import FairseqOptimizer, adam, register_optimizer
from fairseq.optim.adam import FairseqAdamConfig

from fairseq_deep.core.diagnostics.parts import tensor_norms
from fairseq_deep.core.registry import UsageError

from .adam import FusedAdam
from .muon import MOMENTUM, NS_STEPS, SCALES, Muon, is_matrix
from .tensors import alike


@register_optimizer("fused_adam", dataclass=FairseqAdamConfig)
class FairseqAdam(adam.FairseqAdam):
    """fairseq's ``adam`` in few launches; fairseq loads optimizer state only into a class of the same name.

    Raises:
        UsageError: a flag of fairseq's Adam is not supported
    """

    flag = "fused_adam"

    def __init__(self, cfg, params):
        FairseqOptimizer.__init__(self, cfg)
        for flag in ("use_old_adam", "fp16_adam_stats"):
            if getattr(cfg, flag, False):
                dashed = flag.replace("_", "-")
                raise UsageError(f"--{dashed} is not supported with --optimizer {self.flag}: omit it, or use adam")
        self._optimizer = self._build(params)

    def _build(self, params) -> FusedAdam:
        return FusedAdam(params, **self.optimizer_config)

    def load_state_dict(self, state_dict, optimizer_overrides=None):
        """Load the state of a checkpoint.

        Raises:
            UsageError: the checkpoint has the state of another optimizer
        """
        parameters, states = list(self.params), _states(state_dict)
        fits = (not state or self._moment(parameter) in state for parameter, state in zip(parameters, states))
        if len(parameters) != len(states) or not all(fits):
            problem = f"the checkpoint's optimizer state does not fit --optimizer {self.flag} and the precision"
            raise UsageError(f"{problem}: add --reset-optimizer, or use the checkpoint's flags")
        super().load_state_dict(state_dict, optimizer_overrides)

    def _moment(self, parameter: torch.Tensor) -> str:
        """Return the name of an entry in the state of *parameter*."""
        return "exp_avg"

    def multiply_grads(self, c):
        for (grads,) in alike([weight.grad for weight in self.params if weight.grad is not None]):
            torch._foreach_mul_(grads, c.to(grads[0].device) if torch.is_tensor(c) else c)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None):
        """Return the norm of all gradients, and scale them down to *max_norm* if it is positive and smaller."""
        grads = [weight.grad for weight in self.params if weight.grad is not None]
        if not grads or any(hasattr(weight, "expert") for weight in self.params):
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        parts = [norm.float().to(grads[0].device) for (part,) in alike(grads) for norm in tensor_norms(part)]
        total = torch.norm(torch.stack(parts))
        if aggregate_norm_fn is not None:
            total = aggregate_norm_fn(total)
        if max_norm > 0:
            factor = (float(max_norm) / (total + 1e-6)).clamp_(max=1)
            for (part,) in alike(grads):
                torch._foreach_mul_(part, factor.to(part[0].device))
        return total


def _states(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each parameter, in order; it is empty for a parameter without state."""
    return [state_dict["state"].get(index, {}) for group in state_dict["param_groups"] for index in group["params"]]


@dataclass
class MuonConfig(FairseqAdamConfig):
    """Flags of fairseq's Adam and of Muon."""

    muon_momentum: float = field(default=MOMENTUM, metadata={"help": "Muon: momentum, in [0, 1)"})
    muon_ns_steps: int = field(default=NS_STEPS, metadata={"help": "Muon: Newton-Schulz iterations per update"})
    muon_scale: ChoiceEnum(SCALES) = field(
        default=SCALES[0], metadata={"help": "Muon: scale of updates: Adam's RMS, or sqrt(max(1, rows / columns))"}
    )


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FairseqAdam):
    """Muon for the matrices of hidden layers, Adam for all other parameters.

    Raises:
        UsageError: an option is out of range, or the model has no marked matrices
    """

    flag = "muon"

    def _build(self, params) -> Muon:
        params = list(params)
        if not any(is_matrix(parameter) for parameter in params):
            raise UsageError("--optimizer muon requires a model of this package with trainable layers: use a deep_ "
                             "architecture (fairseq-deep archs lists them), or --optimizer fused_adam")  # fmt: skip
        cfg = self.cfg
        muon = {"momentum": cfg.muon_momentum, "ns_steps": cfg.muon_ns_steps, "scale": str(cfg.muon_scale)}
        return Muon(params, **muon, **self.optimizer_config)

    def _moment(self, parameter):
        return "momentum_buffer" if is_matrix(parameter) else "exp_avg"
