"""What torch does on CUDA and not on the meta device: fused attention, dropout and RMSNorm, softmax into fp32."""

import contextlib
import math
from unittest import mock

import torch
import torch.nn.functional as F

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def _dropout(x, p=0.5, training=True, inplace=False):
    if not training or p == 0.0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _fused_mask(mask, query, key):
    """As memory-efficient attention wants it: in the query's type, rows starting at multiples of 16, expanded."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    aligned = mask.stride(-1) == 1 and all(stride % 16 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        pad = -mask.size(-1) % 16
        mask = F.pad(mask, (0, pad))[..., : mask.size(-1)]
    return mask.expand(*query.shape[:-1], key.size(-2))


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Flash attention where it is possible (half precision, no mask), else memory-efficient attention."""
    if query.dtype in HALF and attn_mask is None and query.size(-1) % 8 == 0 and query.size(-1) <= 256:
        op = aten._scaled_dot_product_flash_attention
        return op(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    mask, op = _fused_mask(attn_mask, query, key), aten._scaled_dot_product_efficient_attention
    return op(query, key, value, mask, grad, dropout_p, is_causal, scale=scale)[0]


def _rms_norm(x, shape, weight=None, eps=None):
    """One kernel, as since torch 2.9; LayerNorm without bias stands for it, which reads and writes as much."""
    return torch.native_layer_norm(x, shape, weight, None, eps)[0]


def _into_fp32(fused, plain):
    """torch's softmax of fp16 into fp32 is one kernel on CUDA."""

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        if dtype == torch.float32 and x.dtype == torch.float16 and dim is not None:
            return fused(x, dim, True)
        return plain(x, dim=dim, _stacklevel=_stacklevel, dtype=dtype)

    return softmax


def _on_meta(special, plain):
    def function(x, *args, **kwargs):
        return (special if x.device.type == "meta" else plain)(x, *args, **kwargs)

    return function


def _set_item(tensor, index, value, set_item=torch.Tensor.__setitem__):
    """On CUDA, torch takes a number as a tensor of the host, with which a mask fills and nobody waits."""
    if isinstance(value, (bool, int, float)) and tensor.device.type == "meta":
        value = torch.tensor(value, dtype=tensor.dtype, device="cpu")
    set_item(tensor, index, value)


@contextlib.contextmanager
def cuda_paths():
    """Within it, tensors on the meta device say that they are on a GPU and are treated as those are."""
    softmax, log_softmax = _into_fp32(torch._softmax, F.softmax), _into_fp32(torch._log_softmax, F.log_softmax)
    special = {"dropout": _dropout, "softmax": softmax, "log_softmax": log_softmax}
    if hasattr(F, "scaled_dot_product_attention"):
        special["scaled_dot_product_attention"] = _attention
    if hasattr(F, "rms_norm"):
        special["rms_norm"] = _rms_norm
    with contextlib.ExitStack() as stack:
        for name, function in special.items():
            stack.enter_context(mock.patch.object(F, name, _on_meta(function, getattr(F, name))))
        is_cuda = property(lambda tensor: tensor.device.type in ("cuda", "meta"))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", is_cuda, create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "__setitem__", _set_item))
        yield
