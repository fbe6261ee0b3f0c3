"""What layers attend with: each knows torch alone."""

from .average import AverageAttention, RunningMean
from .decoder import DECODER_ATTENTIONS
from .multihead import MultiheadAttention

__all__ = ["DECODER_ATTENTIONS", "AverageAttention", "MultiheadAttention", "RunningMean"]
