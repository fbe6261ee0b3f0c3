"""What layers attend with (``--decoder-attn``): each knows torch alone."""

import importlib
import pkgutil

from .average import AverageAttention, RunningMean
from .beams import DecodingStep, SharedBeamState
from .decoder import DECODER_ATTENTIONS
from .hypothesis_state import HypothesisState
from .multihead import MultiheadAttention, self_attention
from .ssru import Ssru

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(DECODER_ATTENTIONS.classes())
__all__ = [
    "DECODER_ATTENTIONS", "AverageAttention", "DecodingStep", "HypothesisState", "MultiheadAttention", "RunningMean",
    "SharedBeamState", "Ssru", "self_attention",
] + list(DECODER_ATTENTIONS.classes())  # fmt: skip
