"""Diagnostics of the training of deep models: gradients, variances, streams; independent of fairseq."""

from .gradients import layer_gradient_norms
from .ratios import sublayer_ratios
from .record import depth_record
from .source import source_gain
from .streams import stream_statistics, variance_between
from .weights import WeightMatrix, dlcl_weights

__all__ = [
    "WeightMatrix",
    "depth_record",
    "dlcl_weights",
    "layer_gradient_norms",
    "source_gain",
    "stream_statistics",
    "sublayer_ratios",
    "variance_between",
]
