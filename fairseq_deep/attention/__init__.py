"""What layers attend with: each knows torch alone."""

from .average import AverageAttention, RunningMean
from .beams import Ancestry
from .decoder import DECODER_ATTENTIONS
from .multihead import MultiheadAttention, self_attention

__all__ = ["DECODER_ATTENTIONS", "Ancestry", "AverageAttention", "MultiheadAttention", "RunningMean", "self_attention"]
