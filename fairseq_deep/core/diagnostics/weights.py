"""Learned weight matrices of DLCL, Figure 5 of Wang et al., 2019.

``values[l, k]`` is W^(l+1)_k of Eq. (8) and (9): the weight of y_k (y_0: the embedding output) in x_{l+1}, the input of
layer l+1; row L gives the output of the stack. These are the weights of the sums: after the softmax if there is one,
and 0 above the diagonal and outside the window.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from fairseq_deep.core.aggregators.bands import bands
from fairseq_deep.core.aggregators.dlcl import used_weights


@dataclass(frozen=True)
class WeightMatrix:
    """Weights of one stack of L layers.

    Attributes:
        values: (L+1) x (L+1), in fp32; the mean if an entry has several weights
        per_entry: number of weights per entry: 1, or more with ``--dlcl-weight-type`` scalar_N and vector
    """

    values: Tensor
    per_entry: int

    def significant(self) -> Tensor:
        """Return the points of Fig. 5, (L+1) x (L+1): |w| is at least 0.1 and at least 5 % of its row's maximum."""
        size = self.values.abs()
        return (size >= 0.1) & (size >= 0.05 * size.amax(dim=1, keepdim=True))

    def bands(self) -> dict[str, float]:
        """Return mean |w| of the entries: *newest* y_l, *previous* y_{l-1}, *older* y_0 ... y_{l-2}, *embedding* y_0.

        A band without entries, as in a stack of one layer, is omitted; the embedding is also in one of the other bands.
        """
        return {name: float(value) for name, value in bands(self.values).items()}


def dlcl_weights(
    source: nn.Module | dict[str, Tensor], normalize: bool = False, window: int | None = None
) -> dict[str, WeightMatrix]:
    """Return the matrices of the stacks, "encoder" and "decoder", that have one.

    Args:
        source: a model of this package with weights in its aggregators, or a ``state_dict`` of DLCL (of this package
            or of the original code)
        normalize, window: ``--dlcl-normalize`` and ``--dlcl-window`` of the model, which a ``state_dict`` lacks
    """
    found = {}
    for side in ("encoder", "decoder"):
        if isinstance(source, nn.Module):
            weights = getattr(source, side).aggregator.weights()
        else:
            weight = source.get(f"{side}.history.weight", source.get(f"{side}.history.inner.weight"))
            weights = None if weight is None else used_weights(weight.float(), normalize, window).permute(1, 2, 0)
        if weights is not None:
            weights = weights.reshape(*weights.shape[:2], -1)
            found[side] = WeightMatrix(weights.mean(dim=2), weights.size(2))
    return found
