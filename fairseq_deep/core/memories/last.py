"""Encoder output as the memory of all decoder layers.

Attention Is All You Need, Vaswani et al., 2017, Section 3.1.
"""

from .base import MEMORIES, Memory


@MEMORIES.register("last")
class Last(Memory):
    """No separate memories: every layer attends to the encoder's output."""

    paper = "Vaswani 2017"
