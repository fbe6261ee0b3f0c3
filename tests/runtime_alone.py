"""Run ``fairseq-deep`` where fairseq, omegaconf and hydra cannot be imported; arguments are those of the command."""

import sys

BLOCKED = ("fairseq", "omegaconf", "hydra")


class Blocker:
    """Finds nothing of what is blocked."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
sys.path.insert(0, __file__.rpartition("/tests/")[0])

from fairseq_deep.tools.main import main  # noqa: E402

code = main()
assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
sys.exit(code)
