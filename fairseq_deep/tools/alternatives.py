"""The error for a model that an export format does not support, with the alternatives."""

import contextlib
import re
from collections.abc import Iterator

from fairseq_deep.errors import UsageError

OTHERS = "use --format torch, or fairseq-deep package (most models)"
"""Alternatives for models that a format does not support."""
DEEP = "; a new deep model with --layer-agg residual --residual completep has all formats"


@contextlib.contextmanager
def naming_others() -> Iterator[None]:
    """Add the alternatives to the error for a model that the format does not support."""
    try:
        yield
    except UsageError as error:
        fixed = re.search(": (use|train with) ", error.message)
        deep = DEEP * (" --layer-agg " in error.message)
        raise UsageError(f"{error.message}{deep}; {'or ' * bool(fixed)}{OTHERS}") from error
