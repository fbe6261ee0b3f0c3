"""Describes the matrix products used for decoding on this machine."""

from fairseq_deep.core.native import status

from .bfloat import has_bfloat
from .int8 import NATIVE, WEIGHT_STEPS, available_kernels

LIBRARIES = {NATIVE: "compiled kernels", "qlinear": "oneDNN", "fbgemm": "FBGEMM"}


def describe() -> str:
    """Return a line with the implementations of products in fp32, int8 and bf16."""
    names, steps = available_kernels()
    if not names:
        how = "none, fp32 instead"
    else:
        how = f"{LIBRARIES[names[0]]}, one scale per row"
        how += "" if steps == WEIGHT_STEPS else f", inputs in 7 bits ({steps} steps)"
    bf16 = "oneDNN" if has_bfloat() else "none, fp32 instead"
    return f"fp32: {status()}; int8: {how}; bf16: {bf16}"
