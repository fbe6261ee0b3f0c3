"""Initialisation methods (``--deep-init``): one file per method, independent of fairseq."""

import importlib
import pkgutil

from .base import INITS, Init, MatrixLocation

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update(INITS.classes())
__all__ = ["INITS", "Init", "MatrixLocation"] + list(INITS.classes())
