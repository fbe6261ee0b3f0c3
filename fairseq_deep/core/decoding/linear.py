"""Linear layers for decoding on a CPU, where matrix products take most of the time.

fp32: see ``packed.py``. bf16 and int8 (``--decode-precision``, see ``bfloat.py`` and ``int8.py``): weights, including
the output projection, are stored in that type, and inputs are converted for each product. Other operations and the
embeddings stay in fp32.
"""

import logging

import torch
from torch import nn

from fairseq_deep.core.native import load
from fairseq_deep.core.native.packed import PacksWeight
from fairseq_deep.errors import UsageError

from .bfloat import BfloatLinear, has_bfloat
from .int8 import Int8Linear, available_kernels
from .packed import PackedLinear

logger = logging.getLogger(__name__)
PRECISIONS = ("fp32", "bf16", "int8")


def pack_linear(model: nn.Module) -> int:
    """Pack the linear layers of *model*, in place, if they are on a CPU in fp32; return their number."""
    return 0 if load() is None else _replace(model, PackedLinear, (nn.Linear,))


def unpack_linear(model: nn.Module) -> None:
    """Remove packed weights from *model*: a compiler does not support them, and packs weights itself."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.native, module.packs = None, False


def reduce_precision(stack: nn.Module, precision: str) -> int:
    """Replace the linear layers of *stack*, which can then only translate.

    If this machine or this torch does not support the precision, logs a warning and replaces nothing.

    Args:
        stack: an encoder or a decoder, on the CPU, in fp32
        precision: one of ``PRECISIONS``

    Returns:
        number of layers replaced
    """
    if precision == "fp32":
        return 0
    kind, exists = (BfloatLinear, has_bfloat()) if precision == "bf16" else (Int8Linear, available_kernels())
    if not exists:
        logger.warning(f"this machine or this torch does not have fast {precision} products: they stay in fp32")
        return 0
    count = _replace(stack, kind, (PackedLinear, nn.Linear))
    for part in stack.modules():
        if precision == "int8" and isinstance(part, PacksWeight) and not isinstance(part, PackedLinear):
            part.in_int8 = True
            part.repack()
    return count


def decode_in(model: nn.Module, precision: str) -> tuple[int, int, str]:
    """Lower the matrix products of *model* for translation on a CPU; see :func:`reduce_precision`.

    Both stacks get *precision*. Without compiled kernels, the encoder gets bf16 instead of int8 if this machine has it.

    Returns:
        numbers of replaced layers in the decoder and in the encoder, and the precision of the latter

    Raises:
        UsageError: the model is not on a CPU in fp32
    """
    weight = next(model.decoder.parameters())
    if precision == "fp32":
        return 0, 0, precision
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise UsageError(
            f"--decode-precision {precision} requires a CPU and a model in fp32: add --cpu and omit --fp16, or omit it"
        )
    count = reduce_precision(model.decoder, precision)
    of_encoder = "bf16" if precision == "bf16" or load() is None else "int8"
    # encoder layers of fairseq itself read the attributes of weights
    lowers = hasattr(model.encoder, "stack") and (of_encoder == "int8" or has_bfloat())
    return count, reduce_precision(model.encoder, of_encoder) if lowers else 0, of_encoder


def _replace(module: nn.Module, kind, old) -> int:
    count = 0
    for name, child in module.named_children():
        if type(child) in old and name not in getattr(module, "idle", ()):
            # kernels take no empty matrices, as of feed-forward sub-layers of width 0
            if child.weight.numel() and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(module, name, kind(child))
                count += 1
        elif not isinstance(child, (BfloatLinear, Int8Linear)):
            count += _replace(child, kind, old)
    return count
