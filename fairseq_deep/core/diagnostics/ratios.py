"""Variance and norm preservation per sub-layer: Table 1 of Zhang et al., 2019.

With a sub-layer z -> r = z + F(z) -> o = LN(r), and d_x the gradient of the loss with respect to x (Eq. 10 to 14):

    Var(r)    variance over the features, mean over positions
    beta_LN = |d_r| / |d_o|      beta_RC = |d_z| / |d_r|      beta = beta_LN beta_RC

Norms are over the whole batch. d_z is the gradient at the sub-layer's input through that sub-layer only; other uses of
z do not count. If no norm follows r (pre-norm, no norms at all), beta_LN is missing, and beta is beta_RC.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError

_SIDES = ("encoder", "decoder")


@dataclass
class Ratios:
    """Measurements of one sub-layer; *beta_ln* is None if no norm follows."""

    layer: int
    part: str
    variance: float
    beta_rc: float
    beta_ln: float | None

    @property
    def beta(self) -> float:
        return self.beta_rc if self.beta_ln is None else self.beta_rc * self.beta_ln


class _Probe:
    """Records z, r and o of each sub-layer of one layer, and their gradients."""

    def __init__(self, layer: nn.Module):
        self.parts = [part for part, _ in layer.sublayers]
        self.post_norm = not layer.normalize_before and not isinstance(layer.final_layer_norm, nn.Identity)
        self.inputs: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.handles = [layer.register_forward_pre_hook(self._layer_input)]
        self.handles.append(layer.residual.register_forward_pre_hook(self._connect))
        self.handles.append(layer.residual.register_forward_hook(self._sum))
        if self.post_norm:
            self.handles += [getattr(layer, norm).register_forward_hook(self._output) for _, norm in layer.sublayers]

    @staticmethod
    def _keep(x: Tensor, kept: list[Tensor]) -> Tensor:
        if not x.requires_grad:
            raise UsageError("gradients must be enabled to measure ratios: call outside no_grad")
        x = x * 1  # a copy that only the sub-layer uses
        x.retain_grad()
        kept.append(x)
        return x

    def _layer_input(self, layer, inputs):
        self.bottom = inputs[0]
        return (self._keep(inputs[0], self.inputs), *inputs[1:])

    def _connect(self, residual, inputs):
        return (*inputs[:3], self.bottom)  # reading the layer's input is not the sub-layer's path

    def _sum(self, residual, inputs, output):
        output = self._keep(output, self.sums)
        if not self.post_norm and len(self.sums) < len(self.parts):
            return self._keep(output, self.inputs)
        return output

    def _output(self, norm, inputs, output):
        output = self._keep(output, self.outputs)
        if len(self.outputs) < len(self.parts):
            return self._keep(output, self.inputs)
        return output

    def ratios(self, number: int, words: Tensor) -> list[Ratios]:
        found = []
        kept = self.inputs + self.sums + self.outputs
        if len(self.sums) < len(self.parts) or any(x.grad is None for x in kept):
            raise UsageError(f"layer {number} does not affect the loss: measure without LayerDrop, with all stacks")
        size = len(words)  # a packed sequence may precede the tokens
        for index, part in enumerate(self.parts):
            z, r = self.inputs[index].grad[-size:].norm(), self.sums[index].grad[-size:].norm()
            beta_ln = float(r / self.outputs[index].grad.norm()) if self.post_norm else None
            variance = float(self.sums[index].detach()[-size:][words].var(-1, unbiased=False).mean())
            found.append(Ratios(number, part, variance, float(z / r), beta_ln))
        return found


def sublayer_ratios(
    model: nn.Module, padding: dict[str, Tensor], run: Callable[[], Tensor]
) -> dict[str, list[Ratios]]:
    """Measure every sub-layer in one forward and backward pass.

    Args:
        model: a model of this package with residual connections in at least one stack, in the mode (train or eval) to
            measure
        padding: "encoder" and "decoder": B x T, true where the batch is padding
        run: computes the loss of the batch with *model*

    Returns:
        "encoder" and "decoder": the ratios, layer by layer; empty if an aggregator replaces the connections, or
        evaluates layers more than once

    Raises:
        UsageError: there is nothing to measure
    """
    probes: dict[str, list[_Probe]] = {side: [] for side in _SIDES}
    stacks = {side: list(getattr(model, side).layers) for side in _SIDES}
    measured = {side: layers for side, layers in stacks.items() if all(hasattr(x, "residual") for x in layers)}
    measured = {side: own for side, own in measured.items() if getattr(model, side).aggregator.num_evaluations == 1}
    if not any(measured.values()):
        raise UsageError("no residual connections to measure: use a plain or DLCL stack")
    if any("forward" in vars(layer) for layers in measured.values() for layer in layers):  # see wrap_layer
        raise UsageError("ratios are not supported with recomputed layers: omit --checkpoint-activations")
    try:
        for side, layers in measured.items():
            for layer in layers:
                probes[side].append(_Probe(layer))
        run().backward()
        return {
            side: [
                ratios
                for number, probe in enumerate(side_probes, 1)
                for ratios in probe.ratios(number, ~padding[side].t())
            ]
            for side, side_probes in probes.items()
        }
    finally:
        for probe in (probe for side_probes in probes.values() for probe in side_probes):
            for handle in probe.handles:
                handle.remove()
