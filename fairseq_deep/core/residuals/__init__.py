"""Residual connections of layers (``--residual``): one file per method, independent of fairseq."""

import importlib
import pkgutil

from .base import RESIDUALS, ResidualConnection

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(RESIDUALS.classes())
__all__ = ["RESIDUALS", "ResidualConnection"] + list(RESIDUALS.classes())
