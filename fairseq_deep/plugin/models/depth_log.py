"""Depth metrics in fairseq's training log (``--log-depth-interval``): gradients, streams, aggregators."""


import torch
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_deep.core.diagnostics import depth_record, variance_between

_LAYERS = ("enc_", "dec_", "embed")


class StreamWatch:
    """Records a statistic of the outputs of both stacks of *model* at their next call.

    With gradient accumulation, only the first batch of the update is recorded.

    Attributes:
        shares: {name: share of the variance between the positions of a sentence}, scalar tensors
    """

    def __init__(self, model: nn.Module):
        self.shares: dict[str, Tensor] = {}
        self._handles: list = [
            model.encoder.register_forward_hook(self._see_encoder),
            model.decoder.register_forward_hook(self._see_decoder),
        ]
        self._padding = model.decoder.padding_idx

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see_encoder(self, encoder: nn.Module, inputs, out) -> None:
        if not encoder.training:
            return
        states, padding = out["encoder_states"] or out["encoder_out"], out["encoder_padding_mask"]
        words = torch.ones(states[-1].shape[:2], dtype=torch.bool, device=states[-1].device)
        self._keep("between_enc", states[-1], ~padding[0].t() if padding else words)

    def _see_decoder(self, decoder: nn.Module, inputs, out) -> None:
        if not decoder.training or not inputs:
            return
        states = out[1]["inner_states"]
        self._keep("between_dec", states[-1], inputs[0].ne(self._padding).t())

    @torch.no_grad()
    def _keep(self, name: str, x: Tensor, words: Tensor) -> None:
        if name not in self.shares:
            self.shares[name] = variance_between(x.float(), words)


def log_streams(watch: StreamWatch) -> None:
    """Log the statistics of *watch* in fairseq's metrics; NaN and infinity are dropped, since fairseq logs means."""
    watch.remove()
    for name, value in watch.shares.items():
        if torch.isfinite(value):
            metrics.log_scalar(name, _short(float(value)))


def log_depth(model: nn.Module) -> None:
    """Log the gradient norms of *model* and the weights of its aggregators in fairseq's metrics.

    A layer's norm is logged as a share of the norm of all gradients. The share does not depend on common factors (loss
    scale, division by the sample size, clipping). The log shows the share times fairseq's gnorm.
    """
    for name, value in depth_record(model).items():
        if not name.startswith(_LAYERS):
            metrics.log_scalar(name, _short(value))
            continue
        share = f"_share_{name}"  # fairseq does not print names that begin with an underscore
        metrics.log_scalar(share, value)
        metrics.log_derived(f"gnorm_{name}", _norm(share))


def _norm(share: str):
    def norm(meters: dict) -> float | None:
        values = [meters[name].avg if name in meters else None for name in ("gnorm", share)]
        # no value since the meters were last reset
        return None if None in values else _short(float(values[0]) * values[1])

    return norm


def _short(value: float) -> float:
    """Round to four significant digits; fixed decimals would hide vanishing norms."""
    return float(f"{value:.4g}")
