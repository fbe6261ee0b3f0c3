"""What the layers of the decoder attend to (``--decoder-memory``): one file per method, each knows torch alone."""

import importlib
import pkgutil

from .base import MEMORIES, Memory

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(MEMORIES.classes())
__all__ = ["MEMORIES", "Memory"] + list(MEMORIES.classes())
