"""Linear layers for decoding on a CPU, where matrix products are most of the time.

fp32: see ``packed.py``. bf16 and int8 (``--decode-precision``): the decoder's weights, with the output projection, are stored in that type, and
inputs are converted for each product; everything between the products stays in fp32, the encoder and the embeddings
too. int8 is

    y = s_x s_w (x_q W_q^T) + b

with one scale s_w for each row of W, from its largest |w|, and one scale s_x for each input tensor.
"""

import warnings
from typing import Optional

import torch
from torch import Tensor, nn

from .packed import PackedLinear

PRECISIONS = ("fp32", "bf16", "int8")


class BfloatLinear(nn.Module):
    """A linear layer whose product is in bf16; input and output as before."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.linear.load_state_dict(linear.state_dict())
        self.linear.to(torch.bfloat16)

    @property
    def weight(self) -> Tensor:
        """As fairseq's own attention wants it where it does not decode step by step."""
        return self.linear.weight.float()

    @property
    def bias(self) -> Optional[Tensor]:
        return None if self.linear.bias is None else self.linear.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.bfloat16)).to(x.dtype)


class Int8Linear(nn.Module):
    """A linear layer whose product is in int8; input and output in fp32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8)
        bias = None if linear.bias is None else linear.bias.detach().float()
        with warnings.catch_warnings():  # torch announces a successor of its quantised tensors
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(weight), dtype=torch.long)
            rows = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(rows, bias)

    @property
    def weight(self) -> Tensor:
        """As fairseq's own attention wants it where it does not decode step by step."""
        return torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()

    @property
    def bias(self) -> Optional[Tensor]:
        return torch.ops.quantized.linear_unpack(self.packed)[1]

    def forward(self, x: Tensor) -> Tensor:
        # 7 bits of the input: without VNNI, sums of 8-bit products can overflow the 16 bits of a CPU's registers
        return torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=True)


def pack_linear(model: nn.Module) -> int:
    """Pack the linear layers of *model*, in place, if they are on a CPU in fp32; return their number."""
    return _replace(model, PackedLinear, (nn.Linear,))


def unpack_linear(model: nn.Module) -> None:
    """Leave the products of *model* to a compiler, which does not know packed weights, and packs them itself."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.products = None


def reduce_precision(decoder: nn.Module, precision: str) -> int:
    """Replace the linear layers of *decoder*, which can then translate and no more.

    Args:
        decoder: on the CPU, in fp32
        precision: one of ``PRECISIONS``

    Returns:
        number of layers replaced
    """
    kind = {"fp32": None, "bf16": BfloatLinear, "int8": Int8Linear}[precision]
    return 0 if kind is None else _replace(decoder, kind, (PackedLinear, nn.Linear))


def _replace(module: nn.Module, kind, old) -> int:
    count = 0
    for name, child in module.named_children():
        if type(child) in old and name not in getattr(module, "idle", ()):
            if child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(module, name, kind(child))
                count += 1
        elif not isinstance(child, (BfloatLinear, Int8Linear)):
            count += _replace(child, kind, old)
    return count
