"""``fairseq_deep/runtime/records.py`` only: importing the package takes seconds, and recipes start many programs."""

import importlib.util
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_found = importlib.util.spec_from_file_location(__name__, os.path.join(_ROOT, "fairseq_deep", "runtime", "records.py"))
sys.modules[__name__] = importlib.util.module_from_spec(_found)
_found.loader.exec_module(sys.modules[__name__])
