"""Summary statistics of the weights of sums over layers."""


from torch import Tensor


def bands(weights: Tensor) -> dict[str, Tensor]:
    """Return mean |w| of the entries: *newest* y_l, *previous* y_{l-1}, *older* y_0 ... y_{l-2}, *embedding* y_0.

    Args:
        weights: (L+1) x (L+1) x n, 0 where nothing is read; several weights of an entry are averaged first

    Returns:
        0-dimensional tensors. A band without entries, as in a stack of one layer, is omitted; the embedding is also in
        one of the other bands.
    """
    size = (weights.mean(dim=2) if weights.dim() == 3 else weights).abs()
    found = {"newest": size.diagonal(), "previous": size.diagonal(-1), "embedding": size[:, 0]}
    means = {name: values.mean() for name, values in found.items() if values.numel()}
    entries = (size.size(0) - 1) * (size.size(0) - 2) // 2
    if entries > 0:
        means["older"] = size.tril(-2).sum() / entries  # not by selection: its size needs a synchronisation
    return means
