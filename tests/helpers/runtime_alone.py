"""Run ``fairseq-deep`` where fairseq, omegaconf and hydra cannot be imported; arguments are those of the command."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

BLOCKED = ("fairseq", "omegaconf", "hydra")


class Blocker(MetaPathFinder, Loader):
    """Finds what is blocked, and fails to load it."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in BLOCKED else None

    def create_module(self, spec):
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)


sys.meta_path.insert(0, Blocker())
sys.path.insert(0, __file__.rpartition("/tests/")[0])

from fairseq_deep.tools.main import main  # noqa: E402

code = main()
assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
sys.exit(code)
