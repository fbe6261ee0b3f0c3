"""Faster decoding of trained models: cheaper matrix products, compiled steps."""

from .bfloat import has_bfloat
from .compiled import CompiledSteps
from .linear import PRECISIONS, decode_in, pack_linear, reduce_precision, unpack_linear
from .machine import describe

__all__ = ["PRECISIONS", "CompiledSteps", "decode_in", "describe", "has_bfloat", "pack_linear", "reduce_precision",
           "unpack_linear"]  # fmt: skip
