"""What hides positions from attention, made once a forward pass and not in each layer.

Nothing here waits for a device. What would have to be read from one, as whether a batch has any padding, is asked on a
CPU alone, where asking costs nothing; elsewhere, masks are made in any case.
"""

import torch
from torch import Tensor

from fairseq_deep.core.compat import is_compiling


def is_sync_free(x: Tensor) -> bool:
    """Whether a value of *x* can be read without waiting for a device."""
    return x.device.type == "cpu" and not is_compiling()  # a graph would break where a value is asked for


def check_later(right: Tensor, message: str) -> None:
    """Stop with *message* when the device finds out that *right* is not true everywhere."""
    torch._assert_async(right.all(), message)


def product_type(x: Tensor) -> torch.dtype:
    """The type of matrix products of *x*, which autocast makes another than that of *x*."""
    nothing = x.new_empty(0, 0)
    return torch.mm(nothing, nothing).dtype


def padding_bias(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that keys under *padding* (B x S, true or false) are hidden: B x 1 x 1 x S.

    Their weights are 0 to the last bit. The values are finite, so that queries with nothing but padding to attend to
    do not become NaN.
    """
    value = -3e4 if dtype == torch.float16 else -1e38
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device).masked_fill_(padding, value)
    return bias.view(bias.size(0), 1, 1, bias.size(1))


def future_mask(queries: int, keys: int, like: Tensor, hidden: float = float("-inf")) -> Tensor:
    """What is added to scores so that later keys are hidden: T x S, *hidden* there and 0 elsewhere.

    The last query stands at the last key. Type and device are those of *like*.
    """
    return torch.full((queries, keys), hidden, dtype=like.dtype, device=like.device).triu(keys - queries + 1)
