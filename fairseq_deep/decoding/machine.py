"""What the processor can do, and what decoding in a lower precision does with it, in words."""

import torch

from .bfloat import has_bfloat
from .int8 import INEXACT, WEIGHT_STEPS, ways

# what torch calls its tests, in the order of its versions
TESTS = {
    "VNNI": ("_is_vnni_supported", "_is_avx512_vnni_supported", "_is_cpu_support_vnni"),
    "bf16": ("_is_avx512_bf16_supported",),
    "AMX": ("_is_amx_tile_supported", "_is_cpu_support_amx_tile"),
}
LIBRARIES = {"qlinear": "oneDNN", "int_mm": "torch._int_mm", "fbgemm": "FBGEMM", "dynamic": "FBGEMM"}


def instructions() -> str:
    """The processor's instructions for matrix products, as far as this torch knows them: "AVX512, VNNI"."""
    backend = getattr(torch.backends, "cpu", None)
    names = [backend.get_cpu_capability()] if hasattr(backend, "get_cpu_capability") else []
    for name, tests in TESTS.items():
        known = [getattr(torch.cpu, test) for test in tests if hasattr(getattr(torch, "cpu", None), test)]
        if known and known[0]():
            names.append(name)
    return ", ".join(names) or "unknown"


def describe() -> str:
    """One line: the processor's instructions, and how products in int8 and bf16 are computed."""
    names, steps = ways()
    if not names:
        how = "none, fp32 instead"
    else:
        how = " or ".join(LIBRARIES[name] for name in names)
        how += ", one scale for all rows" if names[0] in INEXACT else ", one scale a row"
        how += "" if steps == WEIGHT_STEPS else f", inputs in 7 bits ({steps} steps)"
        how += ", as measured for each shape" if len(names) > 1 else ""
    return f"{instructions()}; int8: {how}; bf16: {'oneDNN' if has_bfloat() else 'none, fp32 instead'}"
