"""What training with fairseq needs beside the model: an Adam without apex, gradients of two types, checks of flags."""

from . import by_type, fp16  # noqa: F401
from .checks import check_device, check_exact, check_training

__all__ = ["check_device", "check_exact", "check_training"]
