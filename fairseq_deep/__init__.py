"""fairseq_deep: deep Transformers for machine translation, as a fairseq plugin.

Importing the package registers everything with fairseq, so ``--user-dir fairseq_deep`` is all it takes. Three parts
build on each other: ``core`` (the models; torch only), ``runtime`` (translation with trained models) and ``plugin``
(everything that imports fairseq). The command ``fairseq-deep`` is in ``tools``.
"""

from . import moved
from .plugin.compat import FAIRSEQ_ERROR

__version__ = "0.2.0"

moved.install()

if FAIRSEQ_ERROR is None:
    from .plugin import patches, task  # noqa: F401 (registers models, architectures and the task)
    from .plugin.architectures import list_archs
    from .runtime import packaged  # noqa: F401 (registers the format of packaged models)

    patches.apply()
else:

    def list_archs(pattern="*"):
        """Raise: without fairseq there are no architectures."""
        raise ImportError("fairseq cannot be imported: `fairseq-deep doctor` tells why") from FAIRSEQ_ERROR


__all__ = ["__version__", "list_archs"]
