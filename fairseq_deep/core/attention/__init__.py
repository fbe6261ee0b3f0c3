"""Attention modules (``--encoder-attn``, ``--decoder-attn``), independent of fairseq."""

import importlib
import pkgutil

from .average import AverageAttention, RunningMean
from .beams import DecodingStep, SharedBeamState
from .context import LayerContext
from .decoder import DECODER_ATTENTIONS
from .encoder import ENCODER_ATTENTIONS
from .hypothesis_state import HypothesisState
from .multihead import MultiheadAttention
from .ssru import Ssru
from .target import TargetAttention
from .value_residual import FirstValues

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_METHODS = {**ENCODER_ATTENTIONS.classes(), **DECODER_ATTENTIONS.classes()}
globals().update(_METHODS)
__all__ = [
    "DECODER_ATTENTIONS", "ENCODER_ATTENTIONS", "AverageAttention", "DecodingStep", "FirstValues", "HypothesisState",
    "LayerContext", "MultiheadAttention", "RunningMean", "SharedBeamState", "Ssru", "TargetAttention",
] + list(_METHODS)  # fmt: skip
