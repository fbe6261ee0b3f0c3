"""Connections between the layers of a stack (``--layer-agg``): one file per method, independent of fairseq."""

import importlib
import pkgutil

from .base import AGGREGATORS, Aggregator

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(AGGREGATORS.classes())
__all__ = ["AGGREGATORS", "Aggregator"] + list(AGGREGATORS.classes())
