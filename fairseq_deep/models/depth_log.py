"""Per-layer gradient norms in fairseq's own training log (``--log-depth-interval``)."""

from typing import Dict, Optional

from fairseq.logging import metrics
from torch import nn

from ..diagnostics import depth_record

_LAYERS = ("enc_", "dec_", "embed")


def log_depth(model: nn.Module) -> None:
    """Put the norms of the gradients that *model* holds, and what its aggregators have learned, into fairseq's metrics.

    A layer's norm is logged as its share of the norm of all gradients, which no common factor changes (loss scale,
    division by the sample size, clipping). What is shown is that share times fairseq's own gnorm.
    """
    for name, value in depth_record(model).items():
        if not name.startswith(_LAYERS):
            metrics.log_scalar(name, _short(value))
            continue
        share = f"_share_{name}"  # fairseq does not show what begins with an underscore
        metrics.log_scalar(share, value)
        metrics.log_derived(f"gnorm_{name}", _norm(share))


def _norm(share: str):
    def norm(meters: Dict) -> Optional[float]:
        values = [meters[name].avg if name in meters else None for name in ("gnorm", share)]
        # nothing was recorded since the meters were last reset
        return None if None in values else _short(float(values[0]) * values[1])

    return norm


def _short(value: float) -> float:
    """Four significant digits: how a norm vanishes is what the log is for."""
    return float(f"{value:.4g}")
