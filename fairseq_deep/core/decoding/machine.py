"""What decoding in a lower precision does with the processor, in words."""

from .bfloat import has_bfloat
from .int8 import INEXACT, WEIGHT_STEPS, available_kernels

LIBRARIES = {"qlinear": "oneDNN", "int_mm": "torch._int_mm", "fbgemm": "FBGEMM", "dynamic": "FBGEMM"}


def describe() -> str:
    """One line: how products are computed here, in fp32, int8 and bf16."""
    names, steps = available_kernels()
    if not names:
        how = "none, fp32 instead"
    else:
        how = " or ".join(LIBRARIES[name] for name in names)
        how += ", one scale for all rows" if names[0] in INEXACT else ", one scale a row"
        how += "" if steps == WEIGHT_STEPS else f", inputs in 7 bits ({steps} steps)"
        how += ", as measured for each shape" if len(names) > 1 else ""
    bf16 = "oneDNN" if has_bfloat() else "none, fp32 instead"
    return f"fp32: as measured for each shape; int8: {how}; bf16: {bf16}"
