"""The model of a training command: whether its architecture exists, and the formats that it can have."""

from __future__ import annotations

import logging
import sys

from fairseq_deep.errors import UsageError, nearest


def unblock_fairseq() -> None:
    """Allow the import of fairseq, which the driver blocks, since it takes seconds."""
    if sys.modules.get("fairseq", 1) is None:
        del sys.modules["fairseq"]


def describe_exports(command: list[str]) -> str:
    """Describe the formats that the model of a training *command* can have; empty if it has no model of this package.

    Other problems are reported by fairseq-train.

    Raises:
        UsageError: the architecture is unknown
    """
    unblock_fairseq()
    arch = command[command.index("--arch") + 1]
    check_arch(arch)
    from fairseq_deep.plugin.architectures import ARCHITECTURES, TWINS
    from fairseq_deep.runtime.plain import NAMES, formats_of

    from .compare.systems import parse_flags

    logging.getLogger("fairseq").setLevel(logging.WARNING)
    words = [word for word in command[1:] if word != "--fp16"]  # which requires a GPU
    if arch not in {*ARCHITECTURES, *TWINS}:
        return ""
    try:
        formats, why = formats_of(parse_flags(words))
    except (UsageError, SystemExit):
        return ""
    line = ", ".join(["exports  torch (.pt2), package", *formats])
    missing = ", ".join(name for name in NAMES.values() if name not in formats)
    return line + (f"; not {missing} ({why})" if missing else "")


def check_arch(name: str) -> None:
    """Reject an architecture that neither fairseq nor this package registers."""
    unblock_fairseq()
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_deep.plugin.architectures  # noqa: F401 (registers ours)

    if name not in ARCH_MODEL_REGISTRY:
        raise UsageError(f"unknown --arch {name}{nearest(name, ARCH_MODEL_REGISTRY)}: fairseq-deep archs lists them")
