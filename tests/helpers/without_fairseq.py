"""Imported first by a program: fairseq, omegaconf and hydra cannot be imported in it, and this package can."""

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


def block():
    sys.meta_path.insert(0, Blocker())
    sys.path.insert(0, __file__.rpartition("/tests/")[0])


def assert_nothing_is_loaded():
    assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
