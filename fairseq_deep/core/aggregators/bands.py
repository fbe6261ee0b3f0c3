"""Summaries of the weights with which sums read the outputs of layers."""


from torch import Tensor


def bands(weights: Tensor) -> dict[str, Tensor]:
    """Mean |w| of what each sum reads: *newest* y_l, *previous* y_{l-1}, *older* y_0 ... y_{l-2}, *embedding* y_0.

    Args:
        weights: (L+1) x (L+1) x n, 0 where nothing is read; several weights of an entry are averaged first

    Returns:
        0-dimensional tensors. A band without an entry, in a stack of one layer, is left out; the embedding is also in
        one of the others.
    """
    size = (weights.mean(dim=2) if weights.dim() == 3 else weights).abs()
    found = {"newest": size.diagonal(), "previous": size.diagonal(-1), "embedding": size[:, 0]}
    means = {name: values.mean() for name, values in found.items() if values.numel()}
    entries = (size.size(0) - 1) * (size.size(0) - 2) // 2
    if entries > 0:
        means["older"] = size.tril(-2).sum() / entries  # a GPU would have to wait for the size of a selection
    return means
