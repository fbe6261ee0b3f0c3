"""The two forms of the sums of DLCL, x_r = sum_{k<=r} w_rk h_k, with their states.

:class:`TrainingSums` computes all rows over one buffer, with one backward pass. :class:`PlainSums` keeps a list of
entries, and needs nothing for gradients.
"""

from __future__ import annotations

from torch import Tensor, nn

from .running_sums import first_row, next_row, single_sum, split


class TrainingSums:
    """Sums for training; the state [x_r, h_r, token] can be continued once (see ``running_sums.py``).

    Args:
        window: maximum number of entries in a sum
        keeps_entry: the state has h_r, for LayerDrop
    """

    def __init__(self, window: int, keeps_entry: bool):
        self.window, self.keeps_entry = window, keeps_entry

    def start(self, weights: Tensor, entry: Tensor) -> list[Tensor]:
        """Return the state with h_0 = *entry* (T x B x C); *weights*: n x R x R, 0 for entries that are not read."""
        return self._state(first_row(entry, weights, self.window), entry)

    def sum(self, state: list[Tensor], row: int) -> Tensor:
        """Return x_r for r = *row*, the last row of *state*."""
        return state[0]

    def newest(self, state: list[Tensor]) -> Tensor:
        """Return the newest entry h_r."""
        return state[-2]

    def append(self, state: list[Tensor], row: int, entry: Tensor, norm: nn.Module | None = None) -> list[Tensor]:
        """Return the state with h_r = *entry* for r = *row*, or with *norm*, the norm of *entry*."""
        if self.keeps_entry and norm is not None:
            entry, norm = norm(entry), None
        return self._state(next_row([state[0], state[-1]], row, entry, norm), entry)

    def _state(self, row: list[Tensor], entry: Tensor) -> list[Tensor]:
        return [row[0], entry, row[1]] if self.keeps_entry else row


class PlainSums:
    """Sums without gradients; the state is [W, h_k ... h_r]. The methods are those of :class:`TrainingSums`.

    Args:
        window: maximum number of entries in a sum
    """

    def __init__(self, window: int):
        self.window = window

    def start(self, weights: Tensor, entry: Tensor) -> list[Tensor]:
        return [split(weights, entry.dtype), entry.contiguous()]

    def sum(self, state: list[Tensor], row: int) -> Tensor:
        return single_sum(state[0][:, row, :, row + 2 - len(state) : row + 1], state[1:])

    def newest(self, state: list[Tensor]) -> Tensor:
        return state[-1]

    def append(self, state: list[Tensor], row: int, entry: Tensor, norm: nn.Module | None = None) -> list[Tensor]:
        entry = entry if norm is None else norm(entry)
        entries = state[1:] + [entry.to(state[1].dtype).contiguous()]
        return state[:1] + entries[-self.window :]
