"""Faster decoding of trained models: cheaper matrix products, compiled steps."""

from .compiled import CompiledSteps
from .linear import PRECISIONS, pack_linear, reduce_precision, unpack_linear

__all__ = ["PRECISIONS", "CompiledSteps", "pack_linear", "reduce_precision", "unpack_linear"]
