"""Common functions for pictures; matplotlib is imported on first use."""

import io
import os
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.output_files import replacing

FORMATS = ("png", "svg", "pdf")
# distinguishable with colour blindness (Okabe and Ito), most different first
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def check_picture(path: str | None, default: str = "") -> str:
    """Return `path`, or `default` if it is None; called before computations.

    Raises:
        UsageError: the format is not supported, `default` is used and exists, or matplotlib is missing
    """
    if path is None:
        path = default
        if os.path.lexists(path):  # it may show another run
            raise UsageError(f"{path}: exists; add --output {path} to replace it, or choose another --output")
    if _format(path) not in FORMATS:
        raise UsageError(f"cannot draw {path}: the file name must end in {', '.join(f'.{name}' for name in FORMATS)}")
    check_library()
    return path


def check_library() -> None:
    """Raise `UsageError` if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(f"drawing requires matplotlib ({error}): pip install matplotlib") from error


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of `width` x `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str) -> None:
    """Write `figure` to `path` atomically; the output is deterministic."""
    with replacing(path) as temporary:
        _draw(figure, temporary, _format(path))


def as_svg(figure: Any) -> str:
    """Return `figure` as an HTML element."""
    text = io.StringIO()
    _draw(figure, text, "svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(figure: Any, target: Any, kind: str) -> None:
    import matplotlib

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fairseq_deep"}):
        figure.savefig(target, format=kind, dpi=150, metadata=dates.get(kind))


def _format(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()
