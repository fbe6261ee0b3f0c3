"""fairseq's own start, which is close to the papers' baseline (``xavier.py``) but not the same.

fairseq 0.10 and later start with biases of queries, keys, values and of the feed-forward sub-layer that are not zero,
with smaller matrices there (U(+-1/sqrt(fan_in))), and with the gain of self-attention in cross-attention, too.
"""

from .base import INITS, Init


@INITS.register("fairseq")
class Fairseq(Init):
    """Leave everything as fairseq starts it."""

    touches = False
    without_residual = True
