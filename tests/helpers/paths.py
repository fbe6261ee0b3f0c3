"""Where things are, and modules that are found by their folders."""

import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fairseq_deep"
ALONE = ROOT / "tests/helpers/alone.py"  # programs where fairseq cannot be imported
PROGRAMS = ROOT / "tests/helpers/recipe_programs.py"
STOCK = ROOT / "tests/data/stock_fairseq_0.12.2.pt"  # written by fairseq 0.12.2 as published, torch 1.13.1


@contextlib.contextmanager
def importable(*folders):
    """Within it, modules of these folders are imported by their names."""
    names = [str(folder) for folder in folders]
    sys.path[:0] = names
    yield
    for name in names:
        sys.path.remove(name)
