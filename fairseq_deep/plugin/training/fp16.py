"""fairseq's optimizer for half precision, with one launch for copies of all tensors.

fairseq keeps fp32 copies of the weights (``--fp16``, ``--bf16``) and copies gradients and weights tensor by tensor.
With zeroing this takes three launches per tensor, far more than ``fused_adam`` itself. Other optimizers are unchanged.
fairseq's checkpoints have only the rounded weights; ours also have the copies, so resumed runs continue exactly.
"""

import copy
from typing import Any

import torch
from fairseq import optim
from torch import Tensor

from .muon import keep_marks
from .optimizer import FairseqAdam, FairseqMuon
from .tensors import copy_all

COPIES = "fp32_copies"
"""Key of the copies in the optimizer's state."""


class FP16Optimizer(optim.FP16Optimizer):
    """fairseq's class with faster copies; fairseq loads optimizer state only into a class of the same name."""

    @classmethod
    def build_optimizer(cls, cfg, params, **kwargs):
        """Build the optimizer; with Muon, which updates matrices, the fp32 copies are not flattened."""
        if getattr(cfg.optimizer, "_name", None) == FairseqMuon.flag and not cfg.common.fp16_no_flatten_grads:
            cfg = copy.deepcopy(cfg)  # checkpoints must store the user's flags
            cfg.common.fp16_no_flatten_grads = True
        return super().build_optimizer(cfg, params, **kwargs)

    @classmethod
    def build_fp32_params(cls, args, params, flatten=True):
        """Return fp32 copies of *params*; unflattened copies keep the marks for Muon."""
        copies = super().build_fp32_params(args, params, flatten)
        if not flatten:
            keep_marks(copies, params)
        return copies

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state and the fp32 copies of the weights."""
        return {**super().state_dict(), COPIES: [whole.detach() for whole in self._copies()]}

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Load a state, and its copies if they are those of the loaded weights (not in an edited checkpoint)."""
        super().load_state_dict(state_dict, optimizer_overrides)
        own, loaded = self._copies(), state_dict.get(COPIES, [])
        half = torch.float16 if any(param.dtype is torch.float16 for param in self.fp16_params) else torch.bfloat16
        if len(own) == len(loaded) and all(torch.equal(whole.to(half), each.to(whole.device, half))
                                           for whole, each in zip(own, loaded)):  # fmt: skip
            for whole, each in zip(own, loaded):
                whole.data.copy_(each)

    def _copies(self) -> list[Tensor]:
        return list(self.fp32_params.values() if isinstance(self.fp32_params, dict) else self.fp32_params)

    @property
    def _at_once(self) -> bool:
        return isinstance(self.fp32_optimizer, FairseqAdam)

    def _sync_fp16_grads_to_fp32(self):
        if not self._at_once:
            super()._sync_fp16_grads_to_fp32()
        elif self._needs_sync:
            if not self.has_flat_params:
                for weight, whole in zip(self.fp16_params, self.fp32_params):
                    if weight.requires_grad and whole.grad is None:
                        whole.grad = torch.empty_like(whole)
            weights, grads = self._pairs("grad")
            copy_all(grads, [torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
            self._needs_sync = False

    def _sync_fp32_params_to_fp16(self):
        if not self._at_once:
            super()._sync_fp32_params_to_fp16()
        else:
            weights, copies = self._pairs("data")
            copy_all([weight.data for weight in weights], copies)

    def zero_grad(self):
        """Clear all gradients; their fp32 copies take no memory until they are needed."""
        if self._at_once:
            # without a loss scale (bf16), fairseq does not reset the factor after an update
            self._multiply_factor = 1.0
            for whole in [] if self.has_flat_params else self.fp32_params:
                whole.grad = None
        super().zero_grad()

    def _pairs(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the trainable weights, and "data" or "grad" (*name*) of their fp32 copies."""
        if not self.has_flat_params:
            pairs = [pair for pair in zip(self.fp16_params, self.fp32_params) if pair[0].requires_grad]
            return [weight for weight, _ in pairs], [getattr(whole, name) for _, whole in pairs]
        weights: list[Tensor] = []
        parts: list[Tensor] = []
        for device, flat in self.fp32_params.items():
            here = [weight for weight in self.fp16_params if weight.device.index == device]
            split = getattr(flat, name).split([weight.numel() for weight in here])
            weights += here
            parts += [part.view_as(weight) for part, weight in zip(split, here)]
        return weights, parts
