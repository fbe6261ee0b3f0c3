"""Components of training: optimizer, criterion, gradients of two types, memory, data readers, checks."""

from . import criterion, optimizer, schedule  # noqa: F401 (registered with fairseq)
from .adam import set_factors
from .checks import check_device, check_exact, check_training
from .memory import keep_memory
from .muon import mark_matrices

__all__ = ["check_device", "check_exact", "check_training", "keep_memory", "mark_matrices", "set_factors"]
