"""What training needs beside the model: optimizer, criterion, gradients of two types, memory, readers, checks."""

from . import by_type, criterion, fp16, readers  # noqa: F401
from .checks import check_device, check_exact, check_training
from .memory import keep_memory

__all__ = ["check_device", "check_exact", "check_training", "keep_memory"]
