"""Attention masks, built once per forward pass instead of in each layer.

No function here synchronises with a device. A value that depends on data, such as whether a batch has padding, is read
only on a CPU, where reading is free. On other devices, masks are always built.
"""

import torch
from torch import Tensor

from fairseq_deep.core.compat import is_compiling


def is_sync_free(x: Tensor) -> bool:
    """Return whether a value of *x* can be read without a host-device synchronisation."""
    return x.device.type == "cpu" and not is_compiling()  # reading a value breaks the graph


def check_later(right: Tensor, message: str) -> None:
    """Raise *message* from the device, without a synchronisation, if *right* is not true everywhere."""
    torch._assert_async(right.all(), message)


def product_type(x: Tensor) -> torch.dtype:
    """Return the type of matrix products of *x*, which differs from the type of *x* under autocast."""
    nothing = x.new_empty(0, 0)
    return torch.mm(nothing, nothing).dtype


def padding_bias(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for scores that hides the keys under *padding* (B x S, boolean): B x 1 x 1 x S.

    Hidden keys have a weight of exactly 0. The values are finite because queries that see only padding would otherwise
    become NaN.
    """
    value = -3e4 if dtype == torch.float16 else -1e38
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device).masked_fill_(padding, value)
    return bias.view(bias.size(0), 1, 1, bias.size(1))


def future_mask(queries: int, keys: int, like: Tensor, hidden: float = float("-inf")) -> Tensor:
    """Return a bias for scores that hides later keys: T x S, *hidden* there and 0 elsewhere.

    The last query is at the position of the last key. *like* gives type and device.
    """
    return torch.full((queries, keys), hidden, dtype=like.dtype, device=like.device).triu(keys - queries + 1)


def seen_padding(padding: Tensor, causal: bool, on_right: bool) -> Tensor | None:
    """Return *padding* (B x T, boolean); None if no token can see any.

    Args:
        causal: positions see no later ones, so padding on the right needs no mask
        on_right: there is no padding on the left
    """
    if is_sync_free(padding):
        return padding if bool((padding[:, :1] if causal else padding).any()) else None
    if not causal or not on_right:
        return padding
    if padding.is_cuda:
        check_later(padding[:, 0] <= padding[:, -1], "targets are padded on the left: use --left-pad-target")
    return None
