"""Memories that decoder layers attend to (``--decoder-memory``): one file per method, independent of fairseq."""

import importlib
import pkgutil

from .base import MEMORIES, Memory

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(MEMORIES.classes())
__all__ = ["MEMORIES", "Memory"] + list(MEMORIES.classes())
