"""Faster decoding of trained models: cheaper matrix products."""

from .linear import PRECISIONS, pack_linear, reduce_precision

__all__ = ["PRECISIONS", "pack_linear", "reduce_precision"]
