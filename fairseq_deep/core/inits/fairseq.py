"""fairseq's own initialisation, which is close to the papers' baseline (``xavier.py``) but not the same.

In fairseq 0.10 and later, queries, keys, values and the feed-forward sub-layer have non-zero biases. Feed-forward
matrices are smaller (U(+-1/sqrt(fan_in))), and cross-attention has the gain of self-attention.
"""

from .base import INITS, Init


@INITS.register("fairseq")
class Fairseq(Init):
    """Keeps fairseq's initial values."""

    touches = False
    without_residual = True
