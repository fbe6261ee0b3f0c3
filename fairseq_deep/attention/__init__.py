"""What layers attend with: each knows torch alone."""

from .multihead import MultiheadAttention

__all__ = ["MultiheadAttention"]
