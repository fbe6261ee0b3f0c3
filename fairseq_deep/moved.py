"""Deprecated import paths of documented names; they work for one more release, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

MOVED = {
    **{name: f"core.{name}" for name in ("aggregators", "attention", "decoding", "diagnostics", "inits", "layers",
                                         "memories", "registry", "residuals", "stack")},
    **{name: f"plugin.{name}" for name in ("architectures", "models", "task", "training")},
    "packaged": "runtime.packaged",
    "records": "runtime.records",
    "translation": "runtime",
}  # fmt: skip
"""The current path of each module of ``fairseq_deep``, by its old name."""


class _Finder(MetaPathFinder, Loader):
    """Import hook that finds a module under its old name."""

    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        return ModuleSpec(name, self) if package == __package__ and rest.partition(".")[0] in MOVED else None

    def create_module(self, spec):
        package, first, *rest = spec.name.split(".")
        new = ".".join([package, MOVED[first], *rest])
        warnings.warn(f"{spec.name} has moved: import {new}", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Leave the module as it is; importlib has replaced its spec."""
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Install the import hook for the old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
