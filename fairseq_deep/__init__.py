"""fairseq_deep: deep Transformers for machine translation, as a fairseq plugin.

Importing the package registers everything with fairseq, so ``--user-dir fairseq_deep`` is all it takes. Three parts
build on each other: ``core`` (the models; torch only), ``runtime`` (translation with trained models) and ``plugin``
(everything that imports fairseq). The command ``fairseq-deep`` is in ``tools``.
"""

import contextlib
import sys

from . import moved
from .plugin.compat import FAIRSEQ_ERROR

__version__ = "0.3.0"

moved.install()

if FAIRSEQ_ERROR is None:
    from .plugin import patches, stored, task  # noqa: F401 (registers models, architectures, the task and formats)
    from .plugin.architectures import list_archs

    patches.apply()
else:

    def list_archs(pattern="*"):
        """Raise ImportError: fairseq is missing, and architectures are names in its registry."""
        raise ImportError("architectures require fairseq; run 'fairseq-deep doctor'") from FAIRSEQ_ERROR

if "transformers.models.auto" in sys.modules:  # loaded Auto classes get our models at once
    with contextlib.suppress(ImportError):  # transformers before 5
        from . import huggingface  # noqa: F401 (registers the classes)

__all__ = ["__version__", "list_archs"]
