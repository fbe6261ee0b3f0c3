"""fairseq_deep: deep Transformers for machine translation, as a fairseq plugin.

Importing the package registers everything with fairseq, so ``--user-dir fairseq_deep`` enables it. The package has
three layers: ``core`` (the models; requires only torch), ``runtime`` (translation with trained models) and ``plugin``
(everything that imports fairseq). The command ``fairseq-deep`` is in ``tools``.
"""

import contextlib
import importlib
import sys

from .core.registry import load_plugins
from .plugin.compat import FAIRSEQ_ERROR

__version__ = "0.3.0"

if FAIRSEQ_ERROR is None:
    from .plugin import patches, stored, task  # noqa: F401 (registers models, architectures, task and formats)
    from .plugin.architectures import list_archs

    patches.apply()
else:

    def list_archs(pattern="*"):
        """Raise ImportError, since fairseq is missing and architectures are names in its registry."""
        raise ImportError("architectures require fairseq; run 'fairseq-deep doctor'") from FAIRSEQ_ERROR

if "transformers.models.auto" in sys.modules:  # the Auto classes are already loaded: register our models now
    with contextlib.suppress(ImportError):  # transformers before 5
        from . import huggingface  # noqa: F401 (registers the classes)

load_plugins()

__all__ = ["__version__", "list_archs"]
_HOMES = ("runtime", *(f"core.{name}" for name in ("aggregators", "residuals", "memories", "inits", "stack")))
"""Modules with classes that users often expect here."""


def __getattr__(name):
    """Raise an error that names the module of a public class."""
    for home in _HOMES if name[0].isupper() else ():
        if hasattr(importlib.import_module(f"{__name__}.{home}"), name):
            raise ImportError(f"{name} is in another module; use: from {__name__}.{home} import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
