"""Describes the matrix products used for decoding on this machine."""

from fairseq_deep.core.native import status

from .bfloat import has_bfloat
from .int8 import WEIGHT_STEPS, available_kernels


def describe() -> str:
    """Return a line with the implementations of products in fp32, int8 and bf16."""
    how = "none, fp32 instead"
    if (found := available_kernels()) is not None:
        name, steps = found
        how = f"{name}, one scale per row" + ("" if steps == WEIGHT_STEPS else f", inputs in 7 bits ({steps} steps)")
    bf16 = "oneDNN" if has_bfloat() else "none, fp32 instead"
    return f"fp32: {status()}; int8: {how}; bf16: {bf16}"
